"""Building blocks of probes: the answers they give, and the comparison most of them make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .patching import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection

    from .source import Signature, SourceModule, SourceTree


def needed(found: str, where: str) -> Finding:
    return Finding(Verdict.NEEDED, found, where)


def not_needed(found: str, where: str) -> Finding:
    return Finding(Verdict.NOT_NEEDED, found, where)


def unknown(found: str, where: str, expected: str) -> Finding:
    return Finding(Verdict.UNKNOWN_FORM, found, where, expected)


def at(module: SourceModule, line: int | None) -> str:
    return f"{module.path}:{line}" if line else str(module.path)


def absent(tree: SourceTree, module: str, name: str) -> Finding:
    """The answer when a function or class is not where every known release has it."""
    found = tree.module(module)
    if found is None:
        return unknown("no such file", tree.where(module), f"a module that defines {name}")
    return unknown(f"no {name}", str(found.path), f"a definition of {name}")


def unfit(signature: Signature, given: Collection[str], extra: Collection[str] = ()) -> str:
    """Why a call cannot be adapted to a signature; "" when it can.

    Args:
        signature: What the callee takes.
        given: The keywords the adapted call always passes.
        extra: Keywords it passes where the callee takes them.
    """
    refused = sorted(name for name in given if not signature.accepts(name))
    if refused:
        return f"{signature} takes no {', '.join(refused)}"
    missing = sorted(signature.required - set(given) - set(extra))
    return f"{signature} requires {', '.join(missing)}" if missing else ""
