"""Hash functions: the module they live in, which vLLM 0.11.1 split off."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

from ..patching import Finding, Ledger, Patch, Sources
from ..probing import absent, at, misplaced, misreturned, needed, not_needed, unknown

if TYPE_CHECKING:
    from ..source import SourceModule

NAME = "get_hash_fn_by_name"


def locate(sources: Sources) -> SourceModule | Finding:
    """The module that defines get_hash_fn_by_name, or an unknown form."""
    for home in ("utils.hashing", "utils"):
        module = sources.vllm.module(home)
        if module is not None and module.function(NAME) is not None:
            return module
    return absent(sources.vllm, "utils.hashing", NAME)


def probe(sources: Sources) -> Finding:
    module = locate(sources)
    if isinstance(module, Finding):
        return module
    signature = module.function(NAME)
    assert signature is not None
    where = at(module, signature.line)
    # speculators and we call it with the name alone, whatever it is called.
    problem = misplaced(signature, signature.positional[:1] or ("hash_fn_name",))
    if problem := problem or misreturned(module, NAME, "Callable[[Any], bytes]"):
        return unknown(problem, where, "(name of the hash function)")
    if module is sources.vllm.module("utils.hashing"):
        return not_needed(f"{NAME} lives in vllm.utils.hashing", where)
    return needed(f"{NAME} lives in vllm.utils", where)


def apply(module: types.ModuleType, ledger: Ledger) -> None:
    if "vllm.utils.hashing" in sys.modules:  # somebody has mended it by hand
        return
    hashing = types.ModuleType("vllm.utils.hashing", __doc__)
    hashing.get_hash_fn_by_name = getattr(module, NAME)  # type: ignore[attr-defined]
    ledger.add_item(sys.modules, "vllm.utils.hashing", hashing)
    ledger.add(module, "hashing", hashing)


PATCH = Patch(
    id="hashing_location",
    summary="Makes get_hash_fn_by_name available as vllm.utils.hashing.",
    why="vLLM 0.11.0 has it in vllm.utils; speculators 0.4 imports it from vllm.utils.hashing.",
    upstream="vllm/utils/hashing.py, 0.11.1",
    process="both",
    probe=probe,
    target="vllm.utils",
    apply=apply,
    removable="when vLLM 0.11.0 is no longer supported",
)
