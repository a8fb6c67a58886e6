"""The command ``speculators-vllm-compat``. Each of its subcommands is a module in here."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from .. import __version__
from ..activation import revert

if TYPE_CHECKING:
    from collections.abc import Sequence

# Each name is a module with add_arguments(parser) and main(arguments), imported when it is used.
COMMANDS = {
    "check": "tell what is installed, what gets patched and what will bite; imports nothing of it",
    "run": "run an unchanged script or module with the patches",
    "rehearse": "run the generator on a miniature of a model, before the model is loaded",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: What follows the command's name; from ``sys.argv`` when left out.

    Returns:
        The exit status: 0 fine, 1 a problem. Wrong usage exits with 2.
    """
    revert()  # importing the package switched the patches on; a command does so when it needs them
    own, rest = _split(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="speculators-vllm-compat",
        description="Lets speculators' hidden-state generator run, and run right, on your vLLM.",
        epilog="speculators-vllm-compat COMMAND --help tells more, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if own[:1] == [name]:
            module = importlib.import_module(f".{name}", __package__)
            module.add_arguments(subparser)
    arguments = parser.parse_args(own)
    arguments.rest = rest
    status: int = module.main(arguments)
    return status


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What argparse is to read, and what belongs to a script that is run."""
    if list(argv[:1]) != ["run"]:
        return list(argv), []
    end = 3 if list(argv[1:2]) == ["-m"] else 2
    return list(argv[:end]), list(argv[end:])
