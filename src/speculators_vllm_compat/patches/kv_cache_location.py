"""KV-cache helpers: the module they live in, which changed in 0.33."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..patching import Finding, Ledger, Patch, Sources
from ..probing import absent, at, needed, not_needed

if TYPE_CHECKING:
    from types import ModuleType

    from ..source import SourceModule

_HOME = "v1.core.kv_cache_utils"
_NEW_HOME = "v1.core.kv_cache_planning"
_NAMES = (
    "_get_kv_cache_groups_uniform_spec",
    "get_kv_cache_config_from_groups",
    "unify_hybrid_kv_cache_specs",
)


def locate(sources: Sources, name: str) -> SourceModule | Finding:
    """The module that defines a KV-cache helper, or an unknown form."""
    for home in (_HOME, _NEW_HOME):
        module = sources.vllm.module(home)
        if module is not None and module.function(name) is not None:
            return module
    return absent(sources.vllm, _HOME, name)


def probe(sources: Sources) -> Finding:
    moved: list[Finding] = []
    for name in _NAMES:
        module = locate(sources, name)
        if isinstance(module, Finding):
            return module
        line = module.line(name)
        if module is not sources.vllm.module(_HOME):
            moved.append(needed(f"{name} lives in vllm.{_NEW_HOME}", at(module, line)))
    if moved:
        return moved[0]
    home = sources.vllm.module(_HOME)
    assert home is not None
    return not_needed(f"the helpers live in vllm.{_HOME}", at(home, home.line(_NAMES[0])))


def apply(module: ModuleType, ledger: Ledger) -> None:
    # Looked up when asked for: the new module imports this one, so it may not be complete yet.
    def moved(name: str) -> Any:
        if name in _NAMES:
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
    target=f"vllm.{_HOME}",
    apply=apply,
    removable="when no supported speculators imports them",
)
