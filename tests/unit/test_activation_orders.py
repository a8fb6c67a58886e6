"""Every order of apply, apply again, revert and the imports, checked after each step."""

from __future__ import annotations

import textwrap

from fakes import run, write

# No module imports another target, so that each import is a step of its own.
FILES = {
    "speculators/__init__.py": "",
    "speculators/data_generation/__init__.py": "",
    "speculators/data_generation/custom_worker.py": "from vllm.api import Extension\n",
    "transformers/configuration_utils.py": "",
    "vllm/api.py": "class Request: ...\nclass Scheduler: ...\nclass Extension: ...\n",
}

# Patches that use every kind of change there is.
SETUP = """
import collections, itertools
CONFIG = "transformers.configuration_utils"
applied = collections.Counter()

def apply_config(module, ledger):
    ledger.add(module, "torch", "added")
    ledger.add_item(sys.modules, "transformers.gone", type(sys)("transformers.gone"))

def counted(patch_id, function):
    def apply(module, ledger):
        applied[patch_id] += 1
        function(module, ledger)
    return apply

def declare(patch_id, target, apply):
    return Patch(
        id=patch_id, summary="s", why="w", upstream="u", process="driver", removable="r",
        probe=probe, target=target, apply=counted(patch_id, apply),
    )

plan.PATCHES = (
    declare("config", CONFIG, apply_config),
    declare("request", GENERATOR, wrap("Request")),
    declare("extension", CUSTOM_WORKER, wrap("Extension")),
)

def forget():
    compat.revert()
    for name in [n for n in sys.modules if n.split(".")[0] in ("speculators", "transformers")]:
        del sys.modules[name]
    applied.clear()

def patched_modules():
    '''Which of the loaded targets are patched; what is neither nor original fails.'''
    import vllm.api
    found = set()
    if CONFIG in sys.modules and "torch" in vars(sys.modules[CONFIG]):
        found.add(CONFIG)
    assert ("transformers.gone" in sys.modules) == (CONFIG in found)
    for name, attribute in ((GENERATOR, "Request"), (CUSTOM_WORKER, "Extension")):
        if name in sys.modules:
            value, original = getattr(sys.modules[name], attribute), getattr(vllm.api, attribute)
            if value is not original:
                assert value() == (attribute, "patched") and value.__wrapped__ is original
                found.add(name)
    return found

def check(active):
    loaded = {CONFIG, GENERATOR, CUSTOM_WORKER} & set(sys.modules)
    expected = loaded if active and "speculators" in sys.modules else set()
    assert patched_modules() == expected, (patched_modules(), expected)
    armed = [f for f in sys.meta_path if type(f).__name__ == "ImportHooks"]
    assert len(armed) == int(active), armed
    assert ("_SPECULATORS_VLLM_COMPAT_DRIVER" in os.environ) is active
    assert activation._activation._active is active
"""


def test_every_order(tmp_path):
    """After each step exactly the loaded targets are patched, and only while switched on."""
    code = """
        TARGETS = {"config": CONFIG, "driver": GENERATOR, "worker": CUSTOM_WORKER}
        events = [*TARGETS, "apply", "apply", "apply", "revert"]
        orders = sorted(set(itertools.permutations(events)))
        failed = []
        for order in orders:
            forget()
            active = False
            try:
                for step in order:
                    if step in TARGETS:
                        importlib.import_module(TARGETS[step])
                    else:
                        getattr(compat, step)()
                        active = step == "apply"
                    check(active)
                compat.revert()
                check(False)
            except BaseException as error:
                failed.append((order, step, repr(error)))
        print(len(orders), failed[:5])
        """
    assert run(write(tmp_path, FILES), SETUP + textwrap.dedent(code)) == "840 []\n"


def test_threads_apply_each_patch_once(tmp_path):
    code = """
        compat.revert()
        load(), load_worker(), importlib.import_module(CONFIG)
        barrier = threading.Barrier(8)
        errors = []
        def work():
            try:
                barrier.wait()
                compat.apply()
                check(True)
            except BaseException as error:
                errors.append(error)
        for _ in range(20):
            applied.clear()
            threads = [threading.Thread(target=work) for _ in range(8)]
            [t.start() for t in threads]
            [t.join(30) for t in threads]
            assert not any(t.is_alive() for t in threads)
            assert applied == {"config": 1, "request": 1, "extension": 1}, applied
            compat.revert()
            check(False)
        print(errors)
        """
    assert run(write(tmp_path, FILES), SETUP + textwrap.dedent(code)) == "[]\n"


def test_threads_import_while_others_switch(tmp_path):
    code = """
        errors = []
        def work(number):
            try:
                barrier.wait()
                for _ in range(5):
                    if number < 4:
                        (compat.apply, compat.revert)[number % 2]()
                    else:
                        importlib.import_module((GENERATOR, CUSTOM_WORKER, CONFIG)[number % 3])
            except BaseException as error:
                errors.append(repr(error))
        for _ in range(10):
            forget()
            barrier = threading.Barrier(8)
            threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
            [t.start() for t in threads]
            [t.join(30) for t in threads]
            assert not any(t.is_alive() for t in threads)
            compat.revert()
            check(False)
            compat.apply()
            check(True)
        print(errors)
        """
    assert run(write(tmp_path, FILES), SETUP + textwrap.dedent(code)) == "[]\n"


def test_patched_in_two_threads(tmp_path):
    code = """
        compat.revert()
        load()
        inside, leave = threading.Event(), threading.Event()
        def first():
            with compat.patched():
                inside.set()
                leave.wait(10)
        thread = threading.Thread(target=first)
        thread.start()
        inside.wait(10)
        with compat.patched():
            leave.set()
            thread.join()
            print(patched_modules() == {GENERATOR})
        print(patched_modules())
        """
    assert run(write(tmp_path, FILES), SETUP + textwrap.dedent(code)) == "True\nset()\n"


def test_patched_leaves_patches_on_that_were_on(tmp_path):
    code = """
        load()
        with compat.patched():
            check(True)
        check(True)
        compat.revert()
        with compat.patched():
            compat.revert()
            check(False)
        check(False)
        """
    assert run(write(tmp_path, FILES), SETUP + textwrap.dedent(code)) == ""
