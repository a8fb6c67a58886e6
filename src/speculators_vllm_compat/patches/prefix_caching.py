"""Prefix caching must be off: a token taken from the cache is never computed, nor captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, Finding, Ledger, Patch, Sources
from ..probing import absent, at, needed, not_needed, unfit, unknown

if TYPE_CHECKING:
    from types import ModuleType


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module("config.cache")
    fields = module.fields("CacheConfig") if module else None
    if module is None or fields is None:
        return absent(sources.vllm, "config.cache", "CacheConfig")
    where = at(module, fields.line)
    default = module.field_default("CacheConfig", "enable_prefix_caching")
    if default not in {"True", "None", "False"}:
        found = f"enable_prefix_caching with the default {default}"
        if default is None:
            found = "no default of enable_prefix_caching"
        return unknown(found, where, "True, None or False")
    if problem := unfit(fields, {"gpu_memory_utilization", "enable_prefix_caching"}):
        return unknown(problem, where, "gpu_memory_utilization, enable_prefix_caching")
    generator = sources.generator
    calls = generator.calls("CacheConfig") if generator else ()
    if any("enable_prefix_caching" in call.keywords for call in calls):
        return not_needed("speculators sets enable_prefix_caching", where)
    if default != "True":
        return not_needed(f"enable_prefix_caching defaults to {default}", where)
    return needed("enable_prefix_caching defaults to True and speculators leaves it", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    def cache_config(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        kwargs.setdefault("enable_prefix_caching", False)
        return wrapped(*args, **kwargs)

    ledger.wrap(module, "CacheConfig", cache_config)


PATCH = Patch(
    id="prefix_caching",
    summary="Switches prefix caching off where speculators leaves vLLM's default.",
    why="vLLM 0.12 made it on by default. Tokens of a shared prefix are then taken from the "
    "cache: their hidden states are missing and every later slice shifts, silently.",
    upstream="vllm/config/cache.py, 0.12.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators 0.3.0 is no longer supported",
)
