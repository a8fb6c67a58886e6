"""Import hooks: their order, their failures, and that a module notices nothing of them."""

from __future__ import annotations

from fakes import run, write

SETUP = """
import importlib, sys, threading
from speculators_vllm_compat.imports import ImportHooks
events = []
hooks = ImportHooks(
    frozenset({"pack", "pack.inner"}),
    lambda name: events.append(("before", name)),
    lambda name: events.append(("after", name)),
)
hooks.install()
"""

FILES = {
    "pack/__init__.py": "import builtins\ngetattr(builtins, 'events', []).append('runs')\n",
    "pack/inner.py": "VALUE = 1\n",
    "pack/other.py": "",
    "pack/__main__.py": "print('main', __name__)\n",
}


def go(tmp_path, code: str) -> list[str]:
    off = {"SPECULATORS_VLLM_COMPAT": "off"}
    return run(write(tmp_path, FILES), SETUP + code, prelude=False, **off).splitlines()


def test_order_and_that_others_pass_through(tmp_path):
    code = """
import builtins; builtins.events = events
import pack.inner, pack.other
print(events)
print(type(pack.__loader__).__name__, type(pack.__spec__.loader).__name__)
hooks.install(); print(sys.meta_path.count(hooks))
hooks.remove(); hooks.remove(); print(hooks in sys.meta_path)
"""
    assert go(tmp_path, code) == [
        "[('before', 'pack'), 'runs', ('after', 'pack'), ('before', 'pack.inner'), "
        "('after', 'pack.inner')]",
        "SourceFileLoader SourceFileLoader",
        "1",
        "False",
    ]


def test_a_hook_that_raises_fails_the_import_each_time(tmp_path):
    code = """
for when in ("before", "after"):
    def fail(name):
        raise LookupError(name)
    broken = ImportHooks(frozenset({"pack.inner"}), *(
        (fail, events.append) if when == "before" else (events.append, fail)
    ))
    hooks.remove(); broken.install()
    for attempt in range(2):
        try:
            import pack.inner
        except LookupError as error:
            print(when, error, "pack.inner" in sys.modules)
    broken.remove()
import pack.inner
print(pack.inner.VALUE)
"""
    assert go(tmp_path, code) == [
        *["before pack.inner False"] * 2,
        *["after pack.inner False"] * 2,
        "1",
    ]


def test_reload_and_runpy(tmp_path):
    code = """
import runpy, pack.inner
events.clear()
importlib.reload(pack.inner)
print(events)
runpy.run_module("pack")
print(runpy.run_module("pack.inner")["VALUE"])
"""
    assert go(tmp_path, code) == [
        "[('before', 'pack.inner'), ('after', 'pack.inner')]",
        "main pack.__main__",
        "1",
    ]


def test_a_missing_module_and_a_bare_folder_are_left_to_python(tmp_path):
    (tmp_path / "bare").mkdir()
    code = """
more = ImportHooks(frozenset({"bare", "absent"}), events.append, events.append)
more.install()
import bare
print(bare.__file__, events)
try:
    import absent
except ModuleNotFoundError as error:
    print(error)
"""
    assert go(tmp_path, code) == ["None []", "No module named 'absent'"]


def test_two_threads_importing_at_once(tmp_path):
    code = """
threads = [threading.Thread(target=importlib.import_module, args=("pack.inner",)) for _ in "ab"]
[t.start() for t in threads]; [t.join(20) for t in threads]
print(sorted(events), any(t.is_alive() for t in threads))
"""
    assert go(tmp_path, code) == [
        "[('after', 'pack'), ('after', 'pack.inner'), ('before', 'pack'), "
        "('before', 'pack.inner')] False"
    ]
