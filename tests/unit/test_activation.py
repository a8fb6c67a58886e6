"""Switching on and off: every order, every failure, every thread, each in its own process."""

from __future__ import annotations

import itertools

import pytest
from fakes import run, write


@pytest.fixture
def packages(tmp_path):
    return write(tmp_path)


def test_importing_pulls_nothing_in_and_arms(packages):
    out = run(
        packages,
        """
        import sys
        import speculators_vllm_compat
        from speculators_vllm_compat import activation
        heavy = {"torch", "vllm", "transformers", "speculators", "yaml", "wrapt", "packaging"}
        print(sorted(heavy & set(sys.modules)))
        print(activation._activation._hooks is sys.meta_path[0])
        """,
        prelude=False,
    )
    assert out.split("\n")[:2] == ["[]", "True"]


# What may happen before the two modules are looked at, in any order.
STEPS = {
    "apply": "compat.apply()",
    "again": "compat.apply()",
    "driver": "load()",
    "worker": "load_worker()",
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids="-".join)
def test_every_order_of_import_and_apply(packages, order):
    out = run(
        packages,
        "\n".join(
            [
                *(STEPS[step] for step in order),
                "names = (load().Request(), load().Scheduler())",
                "print(names, load_worker().HiddenStatesWorkerExtension())",
                "compat.revert()",
                "import vllm.api",
                "print(load().Request is vllm.api.Request, load().Scheduler is vllm.api.Scheduler)",
                "print(type(load_worker().HiddenStatesWorkerExtension) is type)",
                "print(residue(), compat.status().active)",
                "compat.revert(); compat.apply()",
                "print(load().Request())",
            ]
        ),
        SPECULATORS_VLLM_COMPAT="off",
    )
    assert out.splitlines() == [
        "(('Request', 'patched'), ('Scheduler', 'patched')) "
        "('HiddenStatesWorkerExtension', 'patched')",
        "True True",
        "True",
        "(False, False, 0) False",
        "('Request', 'patched')",
    ]


def test_revert_before_any_import_leaves_everything_alone(packages):
    out = run(
        packages,
        """
        compat.revert()
        import vllm.api
        print(load().Request is vllm.api.Request, residue())
        """,
    )
    assert out == "True (False, False, 0)\n"


@pytest.mark.parametrize("name", ["Request", "Scheduler"])
def test_failure_in_a_patch_undoes_all_and_is_repeated(packages, name):
    out = run(
        packages,
        f"""
        FAIL.add({name!r})
        for attempt in range(2):
            try:
                load()
            except compat.CompatError as error:
                print(type(error).__name__, str(error)[:60])
            print(GENERATOR in sys.modules, residue())
        FAIL.clear()
        print(load().Request(), load().Scheduler())
        """,
    )
    lines = out.splitlines()
    patch = name.lower()
    for first in (0, 2):
        assert lines[first].startswith(f"PatchError {patch} could not be applied to speculators.")
        # The import failed, so the next one runs the patches again; the hooks stay for it.
        assert lines[first + 1] == "False (True, True, 0)"
    assert lines[4] == "('Request', 'patched') ('Scheduler', 'patched')"


def test_failure_in_the_last_module_undoes_the_first_ones_patches(packages):
    out = run(
        packages,
        """
        import vllm.api
        module = load()
        FAIL.add("HiddenStatesWorkerExtension")
        try:
            load_worker()
        except compat.CompatError as error:
            print(error.__cause__)
        print(module.Request is vllm.api.Request, module.Scheduler is vllm.api.Scheduler)
        print(CUSTOM_WORKER in sys.modules)
        FAIL.clear()
        print(load().Request(), load_worker().HiddenStatesWorkerExtension())
        """,
    )
    assert out.splitlines() == [
        "injected",
        "True True",
        "False",
        "('Request', 'patched') ('HiddenStatesWorkerExtension', 'patched')",
    ]


def test_failure_of_apply_by_hand_switches_off(packages):
    out = run(
        packages,
        """
        import vllm.api
        module = load()
        FAIL.add("Scheduler")
        try:
            compat.apply()
        except compat.CompatError as error:
            print(type(error).__name__)
        print(module.Request is vllm.api.Request, residue(), compat.status().active)
        """,
        SPECULATORS_VLLM_COMPAT="off",
    )
    assert out.splitlines() == ["PatchError", "True (False, False, 0) False"]


def test_unknown_form_stops_the_import(tmp_path):
    packages = write(tmp_path, {"vllm/api.py": "# drifted\nclass Request: ...\n"})
    out = run(
        packages,
        """
        for attempt in range(2):
            try:
                import speculators
            except compat.CompatError as error:
                print(error)
            print("speculators" in sys.modules, "vllm" in sys.modules, residue())
        """,
    )
    for part in ("request: vllm/api.py:1: found class Request(*args); expected class Request.",):
        assert out.count(part) == 2
    assert "SPECULATORS_VLLM_COMPAT=warn" in out
    assert out.count("False False (True, True, 0)") == 2


def test_warn_goes_on_without_the_patch(tmp_path):
    packages = write(tmp_path)
    out = run(
        packages,
        """
        from dataclasses import replace
        unknown_probe = lambda sources: unknown("a list", "vllm/api.py:9", "a dict")
        plan.PATCHES = (replace(plan.PATCHES[0], probe=unknown_probe), *plan.PATCHES[1:])
        records = []
        logging.getLogger("speculators_vllm_compat").addHandler(
            type("H", (logging.Handler,), {"emit": lambda self, r: records.append(r)})()
        )
        import vllm.api
        print(load().Request is vllm.api.Request, load().Scheduler())
        print([r.getMessage()[:67].strip() for r in records if r.levelno == logging.WARNING])
        """,
        SPECULATORS_VLLM_COMPAT="warn",
    )
    assert out.splitlines() == [
        "True ('Scheduler', 'patched')",
        "['request: vllm/api.py:9: found a list; expected a dict. This form is']",
    ]


def test_off_and_garbage(packages):
    code = """
        import sys, vllm.api
        try:
            import speculators_vllm_compat
        except Exception as error:
            print(type(error).__name__, error)
        from speculators.data_generation import vllm_hidden_states_generator as module
        print(module.Request is vllm.api.Request)
        """
    assert run(packages, code, prelude=False, SPECULATORS_VLLM_COMPAT="off") == "True\n"
    out = run(packages, code, prelude=False, SPECULATORS_VLLM_COMPAT="maybe")
    assert out.startswith("ConfigurationError SPECULATORS_VLLM_COMPAT is 'maybe'; expected one of")


def test_skip_leaves_out_and_refuses_unknown_ids(packages):
    code = """
        import vllm.api
        try:
            print(load().Request is vllm.api.Request, load().Scheduler())
            print({p.id: p.state for p in compat.status().patches}["request"])
        except compat.CompatError as error:
            print(error)
        """
    out = run(packages, code, SPECULATORS_VLLM_COMPAT_SKIP="request")
    assert out.splitlines() == ["True ('Scheduler', 'patched')", "skipped"]
    out = run(packages, code, SPECULATORS_VLLM_COMPAT_SKIP="request, requset")
    assert out.startswith("SPECULATORS_VLLM_COMPAT_SKIP names requset; expected ids of patches:")


def test_status_tells_the_states(packages):
    out = run(
        packages,
        """
        def states():
            status = compat.status()
            return status.active, status.matrix, {p.id: p.state for p in status.patches}
        print(states())
        load()
        print(states())
        print("yaml" in sys.modules, "vllm.api" in sys.modules)
        status = compat.status()
        print(status.speculators, "|", status.vllm, "|", status.problems)
        print(status.patches[0])
        """,
    )
    lines = out.splitlines()
    waiting = {"request": "waiting", "scheduler": "waiting", "extension": "waiting", "spare": "-"}
    assert lines[0] == str((True, "unlisted", waiting))
    applied = {**waiting, "request": "applied", "scheduler": "applied"}
    assert lines[1] == str((True, "unlisted", applied))
    assert lines[3] == "speculators of unknown version | vllm 1.2.3 | ()"
    assert lines[4].startswith("PatchStatus(id='request', verdict='needed', state='applied'")


def test_reload_is_patched_again(packages):
    out = run(
        packages,
        """
        module = importlib.reload(load())
        print(module.Request())
        del sys.modules[GENERATOR]
        print(load().Request())
        compat.revert()
        import vllm.api
        print(load().Request is vllm.api.Request, module.Request is vllm.api.Request)
        """,
    )
    assert out.splitlines() == ["('Request', 'patched')"] * 2 + ["True True"]


def test_without_vllm_or_without_the_class_speculators_still_imports(tmp_path):
    packages = write(tmp_path)
    (packages / "speculators/data_generation/vllm_hidden_states_generator.py").unlink()
    (packages / "speculators/data_generation/__init__.py").write_text("")
    code = "import speculators; print([p.id for p in compat.status().patches], residue())"
    assert run(packages, code) == "[] (True, True, 0)\n"
    write(tmp_path)
    for path in (packages / "vllm").iterdir():
        path.unlink()
    (packages / "vllm").rmdir()
    assert run(packages, code) == "[] (True, True, 0)\n"


def test_context_manager(packages):
    out = run(
        packages,
        """
        import vllm.api
        compat.revert()
        module = load()
        with compat.patched():
            with compat.patched():
                print(module.Request())
            print(module.Request())
        print(module.Request is vllm.api.Request)
        try:
            with compat.patched():
                raise RuntimeError
        except RuntimeError:
            print(module.Request is vllm.api.Request)
        """,
    )
    assert out.splitlines() == ["('Request', 'patched')"] * 2 + ["True"] * 2


def test_threads(packages):
    out = run(
        packages,
        """
        import vllm.api
        errors = []
        def work(number):
            try:
                for _ in range(50):
                    (compat.apply if number % 2 else compat.revert)()
                    load()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        [t.start() for t in threads]
        [t.join(30) for t in threads]
        print(errors, any(t.is_alive() for t in threads))
        compat.apply()
        module = load()
        print(module.Request(), type(module.Request.__wrapped__) is type)
        compat.revert()
        print(module.Request is vllm.api.Request)
        """,
    )
    assert out.splitlines() == ["[] False", "('Request', 'patched') True", "True"]
