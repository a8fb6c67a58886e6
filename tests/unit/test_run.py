"""``run``: a script notices nothing but the patches."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from commands import command
from fakes import write

SHOW = """
import sys
print(__name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0])
print(sorted(vars()))
"""
PATCHED = "import os; print('_SPECULATORS_VLLM_COMPAT_DRIVER' in os.environ)"


def script(folder, text: str, name: str = "script.py"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def plainly(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same without the command."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def assert_the_same(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    ran, plain = command(folder, "run", *arguments), plainly(folder, *arguments)
    assert ran.stdout == plain.stdout
    assert ran.stderr == plain.stderr
    assert ran.returncode == plain.returncode
    return ran


@pytest.mark.parametrize(
    "rest", [[], ["a", "--help", "-m", "x"], ["--", "-x"], ["--json", "check", ""]]
)
def test_a_script_sees_what_it_always_sees(tmp_path, rest):
    script(tmp_path, SHOW, "folder/script.py")
    assert_the_same(tmp_path, "folder/script.py", *rest)


@pytest.mark.parametrize("name", ["package", "package.module"])
@pytest.mark.parametrize("rest", [[], ["a", "--help", "-m", "x"], ["--", "-x"]])
def test_a_module_sees_what_it_always_sees(tmp_path, name, rest):
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, SHOW, "package/__main__.py")
    script(tmp_path, SHOW, "package/module.py")
    assert_the_same(tmp_path, "-m", name, *rest)


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(7)",
        "import sys; sys.exit('told')",
        "raise SystemExit",
        "import os; os._exit(3)",
        "def f():\n    1 / 0\nf()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e\n",
        "def (",
        "import no_such_module_anywhere",
        "raise KeyboardInterrupt",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1 / 0\n",
        "# -*- coding: latin-1 -*-\nprint('\\xe9')",
        "import atexit\natexit.register(print, 'at exit')\n",
        "import threading\nthreading.Timer(0.05, print, ['later']).start()\n",
    ],
)
def test_exit_status_and_traceback(tmp_path, text):
    script(tmp_path, text)
    assert_the_same(tmp_path, "script.py")


def test_traceback_of_a_module_is_without_runpy(tmp_path):
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, "1 / 0", "package/module.py")
    ended = command(tmp_path, "run", "-m", "package.module")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert lines[1].startswith(f'  File "{tmp_path}/package/module.py", line 1')
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "runpy" not in ended.stderr


@pytest.mark.parametrize("name", ["nothing_of_that_name", "nothing.module", "empty", "odd..name"])
def test_no_such_module(tmp_path, name):
    script(tmp_path, "", "empty/__init__.py")
    ended = command(tmp_path, "run", "-m", name)
    assert ended.returncode == 1
    assert f"no module {name} that can be run was found; expected one" in ended.stderr
    assert "Check the name and the folder" in ended.stderr


def test_an_import_error_inside_of_a_module_is_its_own(tmp_path):
    script(tmp_path, "import missing_thing", "package/__init__.py")
    script(tmp_path, "", "package/module.py")
    ended = command(tmp_path, "run", "-m", "package.module")
    assert ended.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'missing_thing'"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a script, or -m and a module"),
        (["absent.py"], "absent.py is not a file; expected a Python script"),
        (["-m"], "expected one argument"),
    ],
)
def test_usage(tmp_path, arguments, words):
    ended = command(tmp_path, "run", *arguments)
    assert ended.returncode == 2
    assert words in ended.stderr


def test_the_patches_are_on(tmp_path):
    script(tmp_path, PATCHED)
    assert command(tmp_path, "run", "script.py").stdout == "True\n"
    off = command(tmp_path, "run", "script.py", SPECULATORS_VLLM_COMPAT="off")
    assert off.stdout == "False\n"


def test_an_unknown_form_stops_the_script_where_it_imports_speculators(tmp_path):
    write(tmp_path)
    script(tmp_path, "print('before')\nimport speculators\nprint('after')\n")
    ended = command(tmp_path, "run", "script.py")
    assert (ended.returncode, ended.stdout) == (1, "before\n")
    assert "found no such file; expected a module" in ended.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_are_patched_before_the_scripts_code_runs(tmp_path, method):
    text = f"""
        import multiprocessing, sys
        patched = any(type(f).__name__ == "ImportHooks" for f in sys.meta_path)
        def child(depth, queue):
            queue.put((depth, __name__, patched, sys.argv))
            if depth == 1:
                context = multiprocessing.get_context({method!r})
                again = context.Process(target=child, args=(2, queue))
                again.start()
                again.join()
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            process = context.Process(target=child, args=(1, queue))
            process.start()
            for _ in range(2):
                print(*queue.get(timeout=30))
            process.join()
        """
    script(tmp_path, text)
    name = "__main__" if method == "fork" else "__mp_main__"
    ended = command(tmp_path, "run", "script.py", "x")
    assert ended.stdout.splitlines() == [
        f"{depth} {name} True ['script.py', 'x']" for depth in (1, 2)
    ], ended.stderr


def test_what_a_script_defines_can_be_pickled(tmp_path):
    script(tmp_path, "import pickle\nclass A: ...\nprint(type(pickle.loads(pickle.dumps(A()))))")
    assert_the_same(tmp_path, "script.py")
