"""Building blocks of probes: the answers they give, and the comparison most of them make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .patching import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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


def misplaced(signature: Signature, given: Sequence[str]) -> str:
    """Why a call by position cannot be made; "" when it can.

    Args:
        signature: What the callee takes.
        given: The names of the parameters that the call gives values to, in its order.
    """
    if problem := unfit(signature, given):
        return problem
    in_order = signature.positional[: len(given)] == tuple(given)
    return "" if in_order else f"{signature} does not begin with {', '.join(given)}"


def misreturned(module: SourceModule, name: str, known: str) -> str:
    """What else than the known form a function is annotated to return; "" when nothing else is.

    Most of vLLM's code is annotated and checked, so that a return form does not change without
    this. A function without an annotation is only asked whether it returns anything.
    """
    returned = module.returns(name)
    if not returned and known == "None" and module.gives_value(name):
        returned = "a value"
    return f"{name} returns {returned}" if returned not in ("", known) else ""


def lacking(signature: Signature | None, names: Collection[str]) -> str:
    """Which fields a class does not have; "" when it has all of them."""
    missing = sorted(set(names) - set(signature.names if signature else ()))
    return f"no {', '.join(missing)}" if missing else ""


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
