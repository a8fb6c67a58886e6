"""KV-cache layout: from 0.29 the workers' layout is settled before a cache is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..calls import accepts
from ..patching import GENERATOR, Finding, Ledger, Patch, Sources
from ..probing import absent, at, misplaced, misreturned, needed, not_needed, unfit, unknown

if TYPE_CHECKING:
    from types import ModuleType

_BACKENDS = "v1.attention.backends.utils"


def settle_layout(executor: Any, vllm_config: Any) -> None:
    """Ask the workers which layouts they support, choose one and tell them, as EngineCore does."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    all_specs = executor.collective_rpc("get_kv_cache_spec")
    layout = resolve_kv_cache_layout(
        vllm_config,
        executor.get_supported_kv_cache_layouts(),
        [spec for specs in all_specs for spec in specs.values()],
    )
    arguments = [layout.name]
    if accepts(executor.set_kv_cache_layout, "cp_kv_cache_interleave_size"):
        arguments.append(vllm_config.parallel_config.cp_kv_cache_interleave_size)
    executor.set_kv_cache_layout(*arguments)


def probe(sources: Sources) -> Finding:
    backends = sources.vllm.module(_BACKENDS)
    cache = sources.vllm.module("config.cache")
    if cache is None:
        return absent(sources.vllm, "config.cache", "CacheConfig")
    gate = cache.line("CacheConfig.get_resolved_kv_cache_layout")
    if gate is None and "kv_cache_layout" in cache.field_names("CacheConfig"):
        found = "a field kv_cache_layout, and no get_resolved_kv_cache_layout"
        return unknown(found, at(cache, cache.line("CacheConfig")), "both, or neither")
    if gate is None:
        return not_needed("no layout has to be settled", at(cache, cache.line("CacheConfig")))
    signature = backends.function("resolve_kv_cache_layout") if backends else None
    if backends is None or signature is None:
        return absent(sources.vllm, _BACKENDS, "resolve_kv_cache_layout")
    three = ("vllm_config", "supported_layouts", "kv_cache_specs")
    name = "resolve_kv_cache_layout"
    problem = misplaced(signature, three) or misreturned(backends, name, "KVCacheLayout")
    if problem := problem or ("" if signature.names == three else str(signature)):
        return unknown(problem, at(backends, signature.line), f"{name}{three} -> KVCacheLayout")
    executor = sources.vllm.module("v1.executor.abstract")
    publish = executor.function("Executor.set_kv_cache_layout") if executor else None
    ask = executor.function("Executor.get_supported_kv_cache_layouts") if executor else None
    if executor is None or publish is None or ask is None:
        return absent(sources.vllm, "v1.executor.abstract", "Executor.set_kv_cache_layout")
    positional = tuple(p.name for p in publish.parameters if not p.keyword_only)
    one, two = ("layout_name",), ("layout_name", "cp_kv_cache_interleave_size")
    if positional not in (one, two) or positional != publish.names:
        return unknown(str(publish), at(executor, publish.line), f"({one[0]}) or {two}")
    name = "Executor.get_supported_kv_cache_layouts"
    if problem := unfit(ask, ()) or misreturned(executor, name, "list[list[str]]"):
        return unknown(problem, at(executor, ask.line), f"{name}() -> list[list[str]]")
    interface = sources.vllm.module("v1.kv_cache_interface")
    config = interface.fields("KVCacheConfig") if interface else None
    if interface is None or config is None or "kv_cache_layout" not in config.names:
        return absent(sources.vllm, "v1.kv_cache_interface", "KVCacheConfig.kv_cache_layout")
    return needed("a layout must be settled before a cache is planned", at(cache, gate))


def apply(module: ModuleType, ledger: Ledger) -> None:
    def executor(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        made = wrapped(*args, **kwargs)
        settle_layout(made, kwargs["vllm_config"] if "vllm_config" in kwargs else args[0])
        return made

    def config_from_groups(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        planned = wrapped(*args, **kwargs)
        vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        planned.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
        return planned

    ledger.wrap(module, "MultiprocExecutor", executor)
    ledger.wrap(module, "get_kv_cache_config_from_groups", config_from_groups)


PATCH = Patch(
    id="kv_cache_layout",
    summary="Settles the KV-cache layout with the workers before the cache is planned.",
    why="From 0.29 planning a cache without it raises: KV cache layout has not been resolved yet.",
    upstream="vllm/config/cache.py get_resolved_kv_cache_layout, 0.29.0; second argument 0.33.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators resolves the layout",
)
