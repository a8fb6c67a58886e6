"""KV-cache helpers: the module they live in, which changed in 0.33."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..patching import Finding, Ledger, Patch, Sources
from ..probing import absent, at, misplaced, misreturned, needed, not_needed, unknown

if TYPE_CHECKING:
    from types import ModuleType

    from ..source import SourceModule

HOME = "v1.core.kv_cache_utils"
_NEW_HOME = "v1.core.kv_cache_planning"
NAMES = (
    "_get_kv_cache_groups_uniform_spec",
    "get_kv_cache_config_from_groups",
    "unify_hybrid_kv_cache_specs",
)


def locate(sources: Sources, name: str) -> SourceModule | Finding:
    """The module that defines a KV-cache helper, or an unknown form."""
    for home in (HOME, _NEW_HOME):
        module = sources.vllm.module(home)
        if module is not None and module.function(name) is not None:
            return module
    return absent(sources.vllm, HOME, name)


def probe(sources: Sources) -> Finding:
    moved: list[Finding] = []
    known = dict(zip(NAMES, ("list[KVCacheGroupSpec]", "KVCacheConfig", "None"), strict=True))
    for name in NAMES:
        module = locate(sources, name)
        if isinstance(module, Finding):
            return module
        line = module.line(name)
        signature = module.function(name)
        assert signature is not None
        problem = misreturned(module, name, known[name])
        if name != "get_kv_cache_config_from_groups":  # whose arguments are a boundary of their own
            problem = problem or misplaced(
                signature, signature.positional[:1] or ("kv_cache_spec",)
            )
        if problem:
            return unknown(problem, at(module, line), f"{name}(specs) that returns {known[name]}")
        if module is not sources.vllm.module(HOME):
            moved.append(needed(f"{name} lives in vllm.{_NEW_HOME}", at(module, line)))
    if moved:
        return moved[0]
    home = sources.vllm.module(HOME)
    assert home is not None
    return not_needed(f"the helpers live in vllm.{HOME}", at(home, home.line(NAMES[0])))


def apply(module: ModuleType, ledger: Ledger) -> None:
    # Looked up when asked for: the new module imports this one, so it may not be complete yet.
    def moved(name: str) -> Any:
        if name in NAMES:
            return getattr(importlib.import_module(f"vllm.{_NEW_HOME}"), name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    ledger.add(module, "__getattr__", moved)


PATCH = Patch(
    id="kv_cache_location",
    summary="Makes three KV-cache helpers available where speculators imports them from.",
    why="vLLM 0.33 moved them to kv_cache_planning without re-exporting: ImportError.",
    upstream="vllm/v1/core/kv_cache_planning.py, 0.33.0",
    process="both",
    probe=probe,
    target=f"vllm.{HOME}",
    apply=apply,
    removable="when no supported speculators imports them",
)
