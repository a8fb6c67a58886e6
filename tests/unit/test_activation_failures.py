"""What a failure leaves behind, in each patch, by each kind of change, and on the next try."""

from __future__ import annotations

import textwrap

import pytest
from fakes import run, write

FILES = {
    "speculators/__init__.py": "",
    "speculators/data_generation/__init__.py": "",
    "speculators/data_generation/custom_worker.py": (
        "class HiddenStatesWorkerExtension:\n    def capture(self): return 'original'\n"
    ),
    "transformers/configuration_utils.py": "class PretrainedConfig: ...\n",
    "vllm/utils.py": "",
}

SETUP = """
from dataclasses import replace
CONFIG = "transformers.configuration_utils"
TARGETS = (CONFIG, GENERATOR, CUSTOM_WORKER)

def wrapper(wrapped, instance, args, kwargs):
    return "patched"

def change_config(module, ledger):
    ledger.add(module, "torch", "added")
    ledger.add_item(sys.modules, "transformers.gone", type(sys)("transformers.gone"))
    ledger.add_item(os.environ, "ADDED_BY_A_PATCH", "1")

def change_generator(module, ledger):
    ledger.wrap(module, "Request", wrapper)
    ledger.wrap(module.VllmHiddenStatesGenerator, "generate", wrapper)
    ledger.add(module.VllmHiddenStatesGenerator, "truncated", 0)

def change_worker(module, ledger):
    ledger.wrap(module.HiddenStatesWorkerExtension, "capture", wrapper)

class Fault:
    '''Where to fail: in which patch, and whether before or after its changes.'''
    patch, when, error = None, None, None

def declare(patch_id, target, change):
    def apply(module, ledger):
        for when in ("before", "after"):
            if (Fault.patch, Fault.when) == (patch_id, when):
                raise Fault.error
            if when == "before":
                change(module, ledger)
    return replace(patch(patch_id, target, ""), apply=apply)

plan.PATCHES = (
    declare("config", CONFIG, change_config),
    declare("generator", GENERATOR, change_generator),
    declare("worker", CUSTOM_WORKER, change_worker),
)

def load_all():
    return [importlib.import_module(name) for name in TARGETS]

def snapshot():
    '''Every object a patch could have changed, by identity.'''
    owners = [vars(sys.modules[name]) for name in TARGETS if name in sys.modules]
    owners += [vars(v) for o in list(owners) for v in o.values() if isinstance(v, type)]
    faked = {n: m for n, m in sys.modules.items() if n.split(".")[0] in FAKED}
    return (
        [{k: id(v) for k, v in o.items()} for o in owners],
        {name: id(module) for name, module in faked.items()},
        dict(os.environ),
        list(map(id, sys.meta_path)),
    )

FAKED = ("vllm", "speculators", "transformers")

def patched():
    config, generator, worker = load_all()
    return (
        hasattr(config, "torch"),
        "transformers.gone" in sys.modules,
        generator.Request() == "patched",
        worker.HiddenStatesWorkerExtension().capture() == "patched",
    )
"""

_FAULTS = [(p, w) for p in ("config", "generator", "worker") for w in ("before", "after")]


def execute(folder, code: str, files: dict[str, str] | None = None, **variables: str) -> str:
    return run(
        write(folder, {**FILES, **(files or {})}), SETUP + textwrap.dedent(code), **variables
    )


@pytest.mark.parametrize(("patch", "when"), _FAULTS)
def test_apply_by_hand(tmp_path, patch, when):
    code = f"""
        load_all()
        before = snapshot()
        for error, expected in (
            (LookupError("injected"), "PatchError"),
            (compat.CompatError("injected"), "CompatError"),
            (KeyboardInterrupt("injected"), "KeyboardInterrupt"),
        ):
            Fault.patch, Fault.when, Fault.error = {patch!r}, {when!r}, error
            for attempt in range(2):
                try:
                    compat.apply()
                except BaseException as raised:
                    assert type(raised).__name__ == expected, raised
                    assert raised is error or raised.__cause__ is error
                else:
                    raise SystemExit("apply() did not raise")
                assert snapshot() == before
        Fault.patch = None
        compat.apply()
        assert all(patched())
        compat.revert()
        assert snapshot() == before
        print("done")
        """
    assert execute(tmp_path, code, SPECULATORS_VLLM_COMPAT="off") == "done\n"


@pytest.mark.parametrize(("patch", "when"), _FAULTS)
def test_import_fails_each_time_until_the_fault_is_gone(tmp_path, patch, when):
    """The hooks stay, so that no later import goes through unpatched."""
    code = f"""
        targets = dict(zip(("config", "generator", "worker"), TARGETS))
        import speculators
        Fault.patch, Fault.when, Fault.error = {patch!r}, {when!r}, LookupError("injected")
        for attempt in range(2):
            try:
                load_all()
            except compat.CompatError as error:
                assert str(error).startswith({patch!r} + " could not be applied to "), error
                assert error.__cause__ is Fault.error
            else:
                raise SystemExit("the import did not fail")
            assert targets[{patch!r}] not in sys.modules
            assert "transformers.gone" not in sys.modules
            assert "ADDED_BY_A_PATCH" not in os.environ
            assert residue() == (True, True, 0)
            for name in set(TARGETS) & set(sys.modules):
                for value in vars(sys.modules[name]).values():
                    assert not hasattr(value, "__wrapped__")
        Fault.patch = None
        assert all(patched())
        compat.revert()
        assert not any(patched())
        print("done")
        """
    assert execute(tmp_path, code) == "done\n"


def test_message_of_a_failed_patch(tmp_path):
    code = """
        Fault.patch, Fault.when, Fault.error = "generator", "after", LookupError("injected")
        try:
            load_all()
        except compat.CompatError as error:
            print(error)
        """
    message = execute(tmp_path, code)
    for part in (
        "generator could not be applied to speculators.data_generation.vllm_hidden_states_gener",
        "LookupError: injected",
        "Expected the form its probe knows",
        "every patch was undone",
        "speculators of unknown version on vllm 1.2.3",
    ):
        assert part in message


def test_a_failed_import_does_not_break_others(tmp_path):
    code = """
        Fault.patch, Fault.when, Fault.error = "generator", "after", LookupError("injected")
        import transformers.configuration_utils
        try:
            importlib.import_module(GENERATOR)
        except compat.CompatError:
            pass
        import vllm.utils
        print("vllm.utils" in sys.modules)
        """
    assert execute(tmp_path, code) == "True\n"


def test_a_module_that_failed_in_its_own_code_does_not_break_others(tmp_path):
    """Nor is its patch applied before it is there."""
    code = """
        import speculators
        path = importlib.util.find_spec(GENERATOR).origin
        good = open(path).read()
        open(path, "w").write("raise ImportError('of its own')")
        for attempt in range(2):
            try:
                importlib.import_module(GENERATOR)
            except ImportError as error:
                print(error)
        import vllm.utils
        open(path, "w").write(good)
        print(all(patched()))
        """
    assert execute(tmp_path, code) == "of its own\nof its own\nTrue\n"


def test_after_a_failure_in_the_worker_module_the_generator_is_not_used_unpatched(tmp_path):
    code = """
        generator = importlib.import_module(GENERATOR)
        Fault.patch, Fault.when, Fault.error = "worker", "before", LookupError("injected")
        try:
            load_worker()
        except compat.CompatError:
            pass
        Fault.patch = None
        try:
            print(importlib.import_module(GENERATOR).Request())
        except compat.CompatError:
            print("patched")
        """
    assert execute(tmp_path, code) == "patched\n"


_REIMPORTS = {
    "reload": "importlib.reload(speculators)",
    "second import": "del sys.modules['speculators']; import speculators",
}


@pytest.mark.parametrize("how", _REIMPORTS)
def test_revert_after_speculators_was_imported_again(tmp_path, how):
    code = f"""
        import speculators
        load_all()
        assert all(patched())
        {_REIMPORTS[how]}
        assert all(patched())
        compat.revert()
        print(patched())
        """
    assert execute(tmp_path, code) == "(False, False, False, False)\n"


def test_revert_after_a_first_import_of_speculators_failed(tmp_path):
    code = """
        import transformers.configuration_utils as config
        open("speculators/__init__.py", "w").write("raise ImportError('of its own')")
        try:
            import speculators
        except ImportError as error:
            assert str(error) == "of its own"
        open("speculators/__init__.py", "w").write("# mended, and of another length")
        import speculators
        assert config.torch == "added"
        compat.revert()
        print(hasattr(config, "torch"), "transformers.gone" in sys.modules)
        """
    assert execute(tmp_path, code) == "False False\n"


@pytest.mark.parametrize("target", ["GENERATOR", "CUSTOM_WORKER"])
def test_reload_of_a_target_is_patched_again(tmp_path, target):
    code = f"""
        import speculators
        load_all()
        importlib.reload(sys.modules[{target}])
        assert all(patched()), patched()
        compat.revert()
        print(patched())
        """
    assert execute(tmp_path, code) == "(False, False, False, False)\n"


@pytest.mark.parametrize(
    ("patch", "target", "added"),
    [
        ("attn_mask_utils", "transformers", "transformers.modeling_attn_mask_utils"),
        ("hashing_location", "vllm.utils", "vllm.utils.hashing"),
    ],
)
def test_reload_of_the_target_of_a_real_patch_that_adds_a_module(tmp_path, patch, target, added):
    files = {
        "speculators/models/__init__.py": "",
        "speculators/models/eagle.py": (
            "from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask\n"
        ),
        "vllm/utils.py": "def get_hash_fn_by_name(name): ...\n",
    }
    code = f"""
        from speculators_vllm_compat.patches import {patch}
        plan.PATCHES = ({patch}.PATCH,)
        import speculators
        module = importlib.import_module({target!r})
        assert {added!r} in sys.modules
        importlib.reload(module)
        assert {added!r} in sys.modules
        compat.revert()
        print({added!r} in sys.modules)
        """
    assert execute(tmp_path, code, files) == "False\n"


def test_an_import_that_is_blocked_does_not_stop_apply(tmp_path):
    code = """
        import sys
        sys.modules["transformers"] = None
        import speculators_vllm_compat
        print(speculators_vllm_compat.status().active)
        """
    folder = write(tmp_path, FILES)
    assert run(folder, textwrap.dedent(code), prelude=False) == "True\n"


def test_a_stub_in_sys_modules_does_not_stop_apply(tmp_path):
    """Entries without a spec, as tests and mocks put there."""
    code = """
        import sys, types
        for name in ("vllm", "speculators", "transformers"):
            sys.modules[name] = types.ModuleType(name)
        import speculators_vllm_compat
        status = speculators_vllm_compat.status()
        print(status.active, status.patches, status.vllm)
        """
    folder = write(tmp_path, FILES)
    assert run(folder, textwrap.dedent(code), prelude=False) == "True () no vllm\n"


def test_a_patch_that_imports_does_not_wait_for_ever_for_another_thread(tmp_path):
    files = {"transformers/__init__.py": "import time\ntime.sleep(0.5)\n"}
    code = """
        import faulthandler, time
        faulthandler.dump_traceback_later(3, exit=True)
        def apply(module, ledger):
            import transformers
        plan.PATCHES = (
            replace(patch("importing", "vllm.utils", ""), apply=apply, imports=("transformers",)),
        )
        import speculators
        other = threading.Thread(target=importlib.import_module, args=("transformers",))
        other.start()
        time.sleep(0.2)
        import vllm.utils
        other.join()
        print("done")
        """
    assert execute(tmp_path, code, files) == "done\n"


def test_a_probe_that_raises_names_its_boundary(tmp_path):
    code = """
        def probe(sources):
            sources.vllm.module("api").bindings
        plan.PATCHES = (patch("request", GENERATOR, "Request", probe=probe),)
        try:
            import speculators
        except compat.CompatError as error:
            print("request" in str(error), "vllm/api.py" in str(error))
        """
    assert execute(tmp_path, code, {"vllm/api.py": "def ("}) == "True True\n"


def test_apply_within_the_import_of_a_target(tmp_path):
    """Its code would go on after the patches: refused, and nothing is left switched on."""
    generator = """\
        import speculators_vllm_compat
        speculators_vllm_compat.apply()
        from vllm.api import Request, Scheduler
        class VllmHiddenStatesGenerator:
            def generate(self): ...
        """
    files = {"speculators/data_generation/vllm_hidden_states_generator.py": generator}
    code = """
        try:
            load()
        except compat.CompatError as error:
            print(type(error).__name__, "while speculators." in str(error), residue())
        """
    out = execute(tmp_path, code, files, SPECULATORS_VLLM_COMPAT="off")
    assert out == "ConfigurationError True (False, False, 0)\n"


def test_apply_again_within_the_import_of_a_target(tmp_path):
    """As vLLM's plugin loader may: the hooks see the end of that import."""
    generator = """\
        import speculators_vllm_compat
        speculators_vllm_compat.apply()
        from vllm.api import Request, Scheduler
        class VllmHiddenStatesGenerator:
            def generate(self): ...
        """
    files = {"speculators/data_generation/vllm_hidden_states_generator.py": generator}
    assert execute(tmp_path, "print(all(patched()))", files) == "True\n"


def test_revert_within_the_import_of_a_target(tmp_path):
    generator = """\
        import speculators_vllm_compat
        speculators_vllm_compat.revert()
        from vllm.api import Request, Scheduler
        class VllmHiddenStatesGenerator:
            def generate(self): ...
        """
    files = {"speculators/data_generation/vllm_hidden_states_generator.py": generator}
    assert execute(tmp_path, "load(); print(any(patched()), residue())", files) == (
        "False (False, False, 0)\n"
    )
