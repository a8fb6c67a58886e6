"""KV-cache block size: from 0.18 a size that is asked for restricts the attention backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, Finding, Ledger, Patch, Sources
from ..probing import absent, at, needed, not_needed, unknown

if TYPE_CHECKING:
    from types import ModuleType


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module("config.cache")
    fields = module.fields("CacheConfig") if module else None
    if module is None or fields is None:
        return absent(sources.vllm, "config.cache", "CacheConfig")
    where = at(module, fields.line)
    if "block_size" not in fields.names or "block_size" in fields.required:
        return unknown(f"CacheConfig{fields}", where, "an optional field block_size")
    if module.field_default("CacheConfig", "user_specified_block_size") is None:
        # A flag of another name would mean the same, and would not be known.
        flags = [f for f in module.field_names("CacheConfig") if "block_size" in f]
        flags = [f for f in flags if module.annotation("CacheConfig", f) == "bool"]
        if flags:
            found = f"the flags {', '.join(flags)}, and no user_specified_block_size"
            return unknown(found, where, "user_specified_block_size, or no flag of that kind")
        return not_needed("a block size that is asked for restricts nothing", where)
    return needed("a block size that is asked for restricts the attention backends", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    asked_by_speculators = module.VLLM_BLOCK_SIZE

    def cache_config(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        # A subclass that asks for a size of its own keeps it.
        if kwargs.get("block_size") == asked_by_speculators:
            del kwargs["block_size"]
        return wrapped(*args, **kwargs)

    ledger.wrap(module, "CacheConfig", cache_config)


PATCH = Patch(
    id="cache_block_size",
    summary="Leaves the KV-cache block size to vLLM instead of asking for 16.",
    why="From 0.18 an explicit size filters the attention backends: MLA models lose theirs, the "
    "CPU build refuses 16 from 0.29 (No common block size for 16).",
    upstream="vllm/config/cache.py user_specified_block_size, 0.18.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators leaves the block size to vLLM",
)
