"""Import hooks under reload, nesting, removal, threads, and readers of specs and loaders."""

from __future__ import annotations

import textwrap

from fakes import run

SETUP = """
import importlib, importlib.util, sys, threading, time
from speculators_vllm_compat.imports import ImportHooks

events = []
def hooks_for(*names, before=None, after=None):
    made = ImportHooks(
        frozenset(names),
        before or (lambda name: events.append(f"before {name}")),
        after or (lambda name: events.append(f"after {name}")),
    )
    made.install()
    return made

def fail(name):
    raise LookupError(name)

def attempt(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""

FILES = {
    "pack/__init__.py": "",
    "pack/inner.py": (
        "import builtins\nbuiltins.runs = getattr(builtins, 'runs', 0) + 1\nVALUE = 1\n"
    ),
    "pack/outer.py": "import pack.inner\nVALUE = 2\n",
    "pack/data.txt": "data",
    "pack/broken.py": "1 / 0\n",
    "space/inside.py": "VALUE = 3\n",
}


def execute(folder, code: str, prelude: str = SETUP, **variables: str) -> list[str]:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    off = {"SPECULATORS_VLLM_COMPAT": "off", **variables}
    return run(folder, prelude + textwrap.dedent(code), prelude=False, **off).splitlines()


def test_before_runs_ahead_of_the_code_and_after_behind_it(tmp_path):
    code = """
        def before(name):
            module = sys.modules[name]
            events.append((name, hasattr(module, "VALUE"), module.__file__[-8:]))
        def after(name):
            events.append((name, sys.modules[name].VALUE))
        hooks_for("pack.inner", before=before, after=after)
        import pack.inner, pack.inner
        importlib.import_module("pack.inner")
        print(events)
        """
    expected = "[('pack.inner', False, 'inner.py'), ('pack.inner', 1)]"
    assert execute(tmp_path, code) == [expected]


def test_a_watched_module_that_imports_another(tmp_path):
    code = """
        hooks_for("pack", "pack.outer", "pack.inner")
        import pack.outer
        print(events)
        """
    expected = ["before pack", "after pack", "before pack.outer", "before pack.inner"]
    expected += ["after pack.inner", "after pack.outer"]
    assert execute(tmp_path, code) == [str(expected)]


def test_hooks_that_import_watched_modules(tmp_path):
    code = """
        def before(name):
            events.append(f"before {name}")
            import pack.inner
        def after(name):
            events.append(f"after {name}")
            import pack.outer
        hooks_for("pack.outer", "pack.inner", before=before, after=after)
        import pack.outer
        print(events, pack.outer.VALUE)
        """
    expected = ["before pack.outer", "before pack.inner", "after pack.inner", "after pack.outer"]
    assert execute(tmp_path, code) == [f"{expected} 2"]


def test_a_failing_hook_does_not_bind_the_module_to_its_package(tmp_path):
    code = """
        hooks = hooks_for("pack.inner", after=fail)
        print(attempt(importlib.import_module, "pack.inner"))
        print("pack.inner" in sys.modules, hasattr(sys.modules["pack"], "inner"))
        print(attempt(importlib.import_module, "pack.outer"))
        print("pack.outer" in sys.modules)
        hooks.remove()
        print(importlib.import_module("pack.outer").VALUE, runs)
        """
    assert execute(tmp_path, code) == [
        "LookupError: pack.inner",
        "False False",
        "LookupError: pack.inner",
        "False",
        "2 3",
    ]


def test_a_failing_before_keeps_the_code_from_running(tmp_path):
    code = """
        import builtins
        builtins.runs = 0
        hooks_for("pack.inner", before=fail)
        print(attempt(importlib.import_module, "pack.inner"), runs)
        print(attempt(importlib.import_module, "pack.inner"), runs)
        """
    assert execute(tmp_path, code) == ["LookupError: pack.inner 0"] * 2


def test_code_that_fails_runs_no_after(tmp_path):
    code = """
        hooks_for("pack.broken")
        for _ in range(2):
            print(attempt(importlib.import_module, "pack.broken"), "pack.broken" in sys.modules)
        print(events)
        """
    assert execute(tmp_path, code) == [
        *["ZeroDivisionError: division by zero False"] * 2,
        "['before pack.broken', 'before pack.broken']",
    ]


def test_a_hook_that_fails_on_reload_leaves_the_module(tmp_path):
    """As Python leaves a module whose code fails on reload."""
    code = """
        import pack.inner
        module = pack.inner
        hooks_for("pack.inner", after=fail)
        print(attempt(importlib.reload, module), sys.modules["pack.inner"] is module)
        print(type(module.__spec__.loader).__name__, type(module.__loader__).__name__)
        """
    loader = "SourceFileLoader"
    assert execute(tmp_path, code) == ["LookupError: pack.inner True", f"{loader} {loader}"]


def test_modules_do_not_show_the_hooks(tmp_path):
    code = """
        import pack.outer
        plain = {k: type(v).__name__ for k, v in vars(sys.modules["pack.inner"]).items()}
        spec = sys.modules["pack.inner"].__spec__
        for name in ("pack", "pack.inner", "pack.outer"):
            del sys.modules[name]
        hooks_for("pack", "pack.inner")
        import pack.inner
        assert {k: type(v).__name__ for k, v in vars(pack.inner).items()} == plain
        assert pack.inner.__spec__.origin == spec.origin
        assert pack.inner.__spec__.cached == spec.cached
        assert pack.inner.__spec__.loader is pack.inner.__loader__
        import importlib.resources, inspect, pkgutil
        print(importlib.resources.files("pack").joinpath("data.txt").read_text())
        print(pkgutil.get_data("pack", "data.txt"), inspect.getsource(pack.inner)[-10:].strip())
        """
    assert execute(tmp_path, code) == ["data", "b'data' VALUE = 1"]


def test_looking_for_a_watched_module_runs_nothing(tmp_path):
    code = """
        import pack
        hooks_for("pack.inner")
        spec = importlib.util.find_spec("pack.inner")
        print(spec.origin[-8:], spec.loader.get_filename("pack.inner") == spec.origin, events)
        print("VALUE" in spec.loader.get_source("pack.inner"), "pack.inner" in sys.modules)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(module.VALUE, events, type(module.__loader__).__name__)
        """
    assert execute(tmp_path, code) == [
        "inner.py True []",
        "True False",
        "1 ['before pack.inner', 'after pack.inner'] SourceFileLoader",
    ]


def test_python_m_with_a_watched_package(tmp_path):
    """In a process of its own, with the hooks armed by sitecustomize: the code runs as main."""
    (tmp_path / "speculators").mkdir()
    (tmp_path / "speculators/__init__.py").write_text("print('package', __name__)\n")
    (tmp_path / "speculators/__main__.py").write_text("print('main', __name__, __package__)\n")
    (tmp_path / "sitecustomize.py").write_text("import speculators_vllm_compat\n")
    code = """
        import subprocess, sys
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "speculators"], check=True)
        subprocess.run(
            [sys.executable, "-c", "import speculators_vllm_compat as c; print(c.status().active)"],
            check=True,
        )
        """
    assert execute(tmp_path, code, prelude="", SPECULATORS_VLLM_COMPAT="on") == [
        "package speculators",
        "main __main__ speculators",
        "True",
    ]


def test_namespace_packages_pass_through_and_what_is_in_them_does_not(tmp_path):
    code = """
        hooks_for("space", "space.inside")
        import space.inside
        print(space.__file__, space.inside.VALUE, events)
        """
    expected = "None 3 ['before space.inside', 'after space.inside']"
    assert execute(tmp_path, code) == [expected]


def test_removal(tmp_path):
    code = """
        before = list(sys.meta_path)
        hooks = hooks_for("pack.inner")
        assert sys.meta_path == [hooks, *before]
        hooks.install()
        assert sys.meta_path == [hooks, *before]
        hooks.remove()
        assert all(a is b for a, b in zip(sys.meta_path, before, strict=True))
        hooks.remove()
        import pack.inner
        print(events)
        """
    assert execute(tmp_path, code) == ["[]"]


def test_two_hooks_at_once(tmp_path):
    code = """
        hooks_for("pack.inner")
        tell = lambda word: lambda name: events.append(word)
        hooks_for("pack.inner", before=tell("b"), after=tell("a"))
        import pack.inner
        print(events, type(pack.inner.__loader__).__name__)
        """
    expected = "['b', 'before pack.inner', 'after pack.inner', 'a'] SourceFileLoader"
    assert execute(tmp_path, code) == [expected]


def test_a_finder_of_somebody_else_is_asked_too(tmp_path):
    code = """
        from importlib.abc import Loader, MetaPathFinder
        class Made(MetaPathFinder, Loader):
            def find_spec(self, name, path=None, target=None):
                return importlib.util.spec_from_loader(name, self) if name == "made" else None
            def create_module(self, spec):
                return type(sys)("made")
            def exec_module(self, module):
                module.VALUE = 9
        finder = Made()
        sys.meta_path.append(finder)
        hooks_for("made")
        import made
        print(made.VALUE, made.__loader__ is finder, made.__spec__.loader is finder, events)
        """
    expected = "9 True True ['before made', 'after made']"
    assert execute(tmp_path, code) == [expected]


def test_threads_wait_for_a_hook_that_is_slow(tmp_path):
    """The second importer gets the module only when the first one's hook is done with it."""
    code = """
        def after(name):
            time.sleep(0.2)
            sys.modules[name].patched = True
            events.append(name)
        hooks_for("pack.inner", "pack.outer", before=len, after=after)
        found = []
        def work(name):
            found.append(importlib.import_module(name).patched)
        names = ("pack.inner", "pack.outer") * 4
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        [t.start() for t in threads]
        [t.join(30) for t in threads]
        print(found, sorted(events), any(t.is_alive() for t in threads))
        """
    expected = f"{[True] * 8} ['pack.inner', 'pack.outer'] False"
    assert execute(tmp_path, code) == [expected]


def test_threads_when_a_hook_fails_once(tmp_path):
    code = """
        lock, failures = threading.Lock(), [LookupError("once")]
        def after(name):
            with lock:
                if failures:
                    raise failures.pop()
            sys.modules[name].patched = True
        hooks_for("pack.inner", after=after)
        results = []
        def work():
            try:
                results.append(importlib.import_module("pack.inner").patched)
            except LookupError as error:
                results.append(str(error))
        threads = [threading.Thread(target=work) for _ in range(6)]
        [t.start() for t in threads]
        [t.join(30) for t in threads]
        print(sorted(map(str, results)))
        """
    assert execute(tmp_path, code) == [str(["True"] * 5 + ["once"])]
