"""``speculators-vllm-compat run``: an unchanged script, as if it imported this package first."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..activation import activate_by_import

if TYPE_CHECKING:
    import argparse
    from importlib.machinery import ModuleSpec
    from types import CodeType, TracebackType

_EXAMPLES = """\
examples:
  speculators-vllm-compat run scripts/data_generation_offline.py --batch-size 16
  speculators-vllm-compat run -m my_package.generate --layers 2 16 29
  SPECULATORS_VLLM_COMPAT=warn speculators-vllm-compat run script.py

What follows the script or module are its arguments; exit status and traceback
are its own. Processes that it spawns through multiprocessing are patched too.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] (script.py | -m MODULE) [ARGUMENT ...]"
    parser.description = "Run an unchanged script or module with the patches."
    parser.epilog = _EXAMPLES
    parser.add_argument("script", nargs="?", help="a Python file")
    parser.add_argument("-m", dest="module", help="a module, found as python -m finds it")
    parser.set_defaults(usage_error=parser.error)


def main(arguments: argparse.Namespace) -> int:
    if (arguments.script is None) == (arguments.module is None):
        arguments.usage_error("expected a script, or -m and a module")
    if arguments.script is not None and not Path(arguments.script).is_file():
        arguments.usage_error(f"{arguments.script} is not a file; expected a Python script")
    patch_here_and_in_children()
    # The previous __main__ is kept: the interpreter is still running its code.
    _previous.append(sys.modules["__main__"])
    try:
        if arguments.module is not None:
            _run_module(arguments.module, arguments.rest)
        else:
            _run_script(arguments.script, arguments.rest)
    except BaseException:
        # The interpreter reports it as it reports any script's, less the frames of this command.
        report = sys.excepthook
        sys.excepthook = lambda kind, error, trace: report(
            kind, error.with_traceback(_own_frames(trace)), error.__traceback__
        )
        raise
    return 0


def patch_here_and_in_children() -> None:
    """Switch the patches on, in this process and in those that multiprocessing spawns from it.

    A spawned child begins with the script's code, which does not import this package.
    """
    import multiprocessing.spawn as spawn

    activate_by_import()
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), __package__: _PatchWhenUnpickled()}

    spawn.get_preparation_data = get_preparation_data


class _PatchWhenUnpickled:
    """A child unpickles what its parent prepared before it runs the script's code."""

    def __reduce__(self) -> Any:
        return patch_here_and_in_children, ()


_previous: list[types.ModuleType] = []


def _run_script(script: str, rest: list[str]) -> None:
    path = Path(script).absolute()
    sys.argv[:] = [script, *rest]
    _replace_first_path(str(Path(script).resolve().parent))
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    main_module = _new_main(loader=loader, file=str(path))
    exec(loader.source_to_code(loader.get_data(str(path)), str(path)), vars(main_module))


def _run_module(name: str, rest: list[str]) -> None:
    sys.argv[:] = ["-m", *rest]
    _replace_first_path(str(Path.cwd()))
    spec, code = _find(name)
    sys.argv[0] = str(spec.origin)
    main_module = _new_main(loader=spec.loader, file=str(spec.origin), spec=spec)
    exec(code, vars(main_module))


def _find(name: str) -> tuple[ModuleSpec, CodeType]:
    """The module that ``python -m`` would run; a package stands for its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        # One of the names in front of the last is missing; an import inside of them is theirs.
        if not error.name or not f"{name}.__main__".startswith(f"{error.name}."):
            raise
        spec = None
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        print(
            f"speculators-vllm-compat run: no module {name} that can be run was found; expected "
            "one on the import path, or a package with a __main__. Check the name and the folder "
            "this is started in.",
            file=sys.stderr,
        )
        sys.exit(1)
    return spec, code


def _new_main(*, loader: Any, file: str, spec: ModuleSpec | None = None) -> types.ModuleType:
    """A ``__main__`` such as the interpreter makes: pickle and multiprocessing look at it."""
    module = types.ModuleType("__main__")
    vars(module).update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=spec.cached if spec is not None else None,
        __file__=file,
        __loader__=loader,
        __package__=spec.parent if spec is not None else None,
        __spec__=spec,
    )
    sys.modules["__main__"] = module
    return module


def _replace_first_path(folder: str) -> None:
    """Put the script's folder where Python has put this command's."""
    if getattr(sys.flags, "safe_path", False):  # python -P, from 3.11: there is none
        return
    sys.path[0] = folder


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script, or None when none of it does."""
    ours = (str(Path(__file__).parents[1]) + os.sep, importlib.util.__file__, "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code is not main.__code__:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace
