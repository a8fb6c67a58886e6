"""``speculators-vllm-compat check``: know before anything is loaded."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import CompatError, ConfigurationError
from .archives import package_at
from .report import Report, examine, unusable
from .terminal import Style

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from .report import Boundary, Component

_EXAMPLES = """\
examples:
  speculators-vllm-compat check                     what is installed here
  speculators-vllm-compat check --json | jq .notices
  speculators-vllm-compat check --vllm vllm-X-py3-none-any.whl
  speculators-vllm-compat check --vllm src/vllm --speculators src/speculators

exit status: 0 fine, 1 a problem was found, 2 wrong usage.
Warnings and notes leave it at 0.
"""
_STATE_COLOURS = {"as is": (), "patched": ("green",), "skipped": ("magenta",)}
_LEVEL_COLOURS = {"problem": ("bold", "red"), "warning": ("bold", "magenta"), "note": ("bold",)}
_WIDE = 110  # columns from which there is room to tell what each probe found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tell what is installed, whether each boundary between speculators and vLLM is\n"
        "used as is, patched or of unknown form, and what in this environment will\n"
        "bite. Reads files alone: nothing of vllm, torch, transformers and speculators\n"
        "is imported."
    )
    parser.epilog = _EXAMPLES
    for module in ("vllm", "speculators"):
        parser.add_argument(
            f"--{module}",
            metavar="PATH",
            type=Path,
            help=f"look at this {module} in place of the installed one: an unpacked tree, a wheel "
            "or a source distribution",
        )
    parser.add_argument("--json", action="store_true", help="print JSON, schema 1")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="tell what each probe found, on any terminal"
    )
    parser.set_defaults(usage_error=parser.error)


def main(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        given = {}
        for module in ("vllm", "speculators"):
            path = getattr(arguments, module)
            try:
                if path is not None:
                    given[module] = package_at(module, path.expanduser(), Path(scratch))
            except ConfigurationError as error:
                arguments.usage_error(f"--{module}: {error}")
        try:
            report = examine(given)
        except CompatError as error:
            report = unusable(error)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print("\n".join(text(report, Style.of(sys.stdout), verbose=arguments.verbose)))
    return 0 if report.fine else 1


def text(report: Report, style: Style, *, verbose: bool = False) -> Iterator[str]:
    """The report in lines that fit the terminal."""
    yield style.paint(f"speculators-vllm-compat {__version__}", "bold")
    yield ""
    yield from _components(report.components, style)
    if report.boundaries:
        yield ""
        yield from _boundaries(report, style, verbose=verbose)
    if report.workers:
        yield ""
        yield from _workers(report, style)
    yield ""
    yield from _notices(report, style)


def _components(components: tuple[Component, ...], style: Style) -> Iterator[str]:
    yield style.paint("Installed", "bold")
    names = max(len(c.name) for c in components)
    versions = max(len(c.version or "unknown") for c in components)
    for component in components:
        version = component.version or ("unknown" if component.location else "-")
        line = f"  {component.name:{names}}  {version:{versions}}"
        yield from _in_columns(line, component.location, 6, style)


def _boundaries(report: Report, style: Style, *, verbose: bool) -> Iterator[str]:
    yield style.paint("Matrix", "bold")
    cell = f": speculators {report.cell.replace(' on ', ' on vLLM ')}" if report.cell else ""
    yield f"  {report.word}{cell}"
    for run in report.verified:
        yield from _indented(
            f"{run.date}, {run.device}, {run.cases} cases: at most {run.largest_difference:.1e} "
            "from transformers",
            2,
            style,
        )
    yield ""
    counts = [
        f"{report.count(state)} {state}"
        for state in ("patched", "as is", "skipped", "unknown form")
        if report.count(state)
    ]
    yield style.paint("Boundaries", "bold") + f"  {', '.join(counts)}"
    states = max(len(b.state) for b in report.boundaries)
    names = max(len(b.id) for b in report.boundaries)
    for boundary in report.boundaries:
        yield from _boundary(boundary, states, names, style, verbose=verbose)


def _boundary(
    boundary: Boundary, states: int, names: int, style: Style, *, verbose: bool
) -> Iterator[str]:
    state = style.paint(f"{boundary.state:{states}}", *_STATE_COLOURS.get(boundary.state, ("red",)))
    prefix = f"  {boundary.state:{states}}  {boundary.id:{names}}"
    lines = list(_in_columns(prefix, boundary.where, states + 4, style))
    yield lines[0].replace(f"{boundary.state:{states}}", state, 1)
    yield from lines[1:]
    if verbose or style.width >= _WIDE:
        yield from _indented(boundary.found, states + 4, style)


def _workers(report: Report, style: Style) -> Iterator[str]:
    yield style.paint("Workers", "bold")
    workers = report.workers
    if workers["patched"]:
        allowed = "unset" if workers["VLLM_PLUGINS"] is None else "names it"
        told = f"get patched: vLLM loads this package's plugin (VLLM_PLUGINS {allowed})"
    else:
        told = "would not be patched, see below"
    yield from _indented(told, 2, style)
    method = workers["start_method"]
    started = {
        "fork": "start by fork; vLLM takes spawn once CUDA is initialised in the driver. A script "
        'then needs if __name__ == "__main__": around its own code.',
        "spawn": 'start by spawn: a script needs if __name__ == "__main__": around its own code.',
    }
    yield from _indented(started.get(method, f"start method {method}, see below"), 2, style)


def _notices(report: Report, style: Style) -> Iterator[str]:
    levels: list[str] = [notice.level for notice in report.notices]
    if levels:
        yield style.paint("Findings", "bold")
    for notice in report.notices:
        level = f"{notice.level:7}"
        first, *rest = style.wrapped(notice.found, 11, 11)
        yield f"  {style.paint(level, *_LEVEL_COLOURS[notice.level])}  {first}"
        yield from rest
        remedy, *rest = style.wrapped(notice.remedy, 14, 14)
        yield f"{'':11}{style.paint('->', 'bold', 'cyan')} {remedy}"
        yield from rest
    if levels:
        yield ""
    counted = [
        f"{levels.count(level)} {level}{'s' if levels.count(level) > 1 else ''}"
        for level in ("problem", "warning", "note")
        if level in levels
    ]
    told = f": {', '.join(counted)}" if counted else ""
    if report.fine:
        yield style.paint("fine", "bold", "green") + told
    else:
        yield style.paint("not fine", "bold", "red") + told


def _in_columns(prefix: str, last: str, indent: int, style: Style) -> Iterator[str]:
    """A line with a last column, which goes on a line of its own when there is no room."""
    if len(prefix) + 2 + len(last) <= style.width:
        yield f"{prefix}  {last}".rstrip()
    else:
        yield prefix.rstrip()
        yield f"{'':{indent}}{last}"


def _indented(told: str, columns: int, style: Style) -> Iterator[str]:
    first, *rest = style.wrapped(told, columns, columns)
    yield " " * columns + first
    yield from rest
