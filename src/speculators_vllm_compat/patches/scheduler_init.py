"""Scheduler arguments: ``block_size``, from 0.11.1, must be the one the workers settled on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..calls import accepts
from ..patching import GENERATOR, Finding, Ledger, Patch, Sources
from ..probing import (
    absent,
    at,
    lacking,
    misplaced,
    misreturned,
    needed,
    not_needed,
    unfit,
    unknown,
)
from .cache_block_size import probe as block_size_is_chosen_by_vllm

if TYPE_CHECKING:
    from types import ModuleType

    from ..source import Signature

_RESOLVE = "resolve_kv_cache_block_sizes"
_ALWAYS = {"vllm_config", "kv_cache_config", "structured_output_manager"}


def block_sizes(kv_cache_config: Any, vllm_config: Any) -> dict[str, int]:
    """The block sizes a Scheduler is given, settled as EngineCore settles them.

    Returns:
        ``block_size`` and, where vLLM tells the two apart, ``hash_block_size``, in tokens.
    """
    from vllm.v1.core import kv_cache_utils

    groups = kv_cache_config.kv_cache_groups
    if groups:
        vllm_config.cache_config.block_size = min(g.kv_cache_spec.block_size for g in groups)
    if not hasattr(kv_cache_utils, "resolve_kv_cache_block_sizes"):
        return {"block_size": vllm_config.cache_config.block_size}
    block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(
        kv_cache_config, vllm_config
    )
    return {"block_size": block_size, "hash_block_size": hash_block_size}


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module("v1.core.sched.scheduler")
    signature = module.function("Scheduler.__init__") if module else None
    if module is None or signature is None:
        return absent(sources.vllm, "v1.core.sched.scheduler", "Scheduler.__init__")
    where = at(module, signature.line)
    if problem := unfit(signature, _ALWAYS, {"block_size"}):
        return unknown(problem, where, f"{sorted(_ALWAYS)}, with or without block_size")
    if strange := _unknown_sizes(sources, signature):
        return strange
    generator = sources.generator
    calls = generator.calls("Scheduler") if generator else ()
    passed = any("block_size" in call.keywords for call in calls)
    if not signature.accepts("block_size"):
        if passed:
            return needed("Scheduler takes no block_size", where)
        return not_needed("Scheduler takes no block_size, and speculators passes none", where)
    if not passed:
        return needed("Scheduler requires block_size", where)
    if block_size_is_chosen_by_vllm(sources).verdict.value == "needed":
        return needed("the block size is chosen by the attention backend", where)
    return not_needed("Scheduler takes the block size speculators asked for", where)


def _unknown_sizes(sources: Sources, scheduler: Signature) -> Finding | None:
    """Why :func:`block_sizes` would not settle them; None when it does."""
    interface = sources.vllm.module("v1.kv_cache_interface")
    if interface is None:
        return absent(sources.vllm, "v1.kv_cache_interface", "KVCacheConfig")
    for name, fields in (
        ("KVCacheConfig", ("num_blocks", "kv_cache_groups")),
        ("KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    ):
        if problem := lacking(interface.fields(name), fields):
            return unknown(
                f"{name} with {problem}", at(interface, interface.line(name)), f"{fields}"
            )
    if not scheduler.accepts("hash_block_size"):
        return None
    module = sources.vllm.module("v1.core.kv_cache_utils")
    signature = module.function(_RESOLVE) if module else None
    if module is None or signature is None:
        return absent(sources.vllm, "v1.core.kv_cache_utils", _RESOLVE)
    given = ("kv_cache_config", "vllm_config")
    if problem := misplaced(signature, given) or misreturned(module, _RESOLVE, "tuple[int, int]"):
        where = at(module, signature.line)
        return unknown(problem, where, f"{_RESOLVE}{given} -> tuple[int, int]")
    return None


def apply(module: ModuleType, ledger: Ledger) -> None:
    def scheduler(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        if {"kv_cache_config", "vllm_config"} <= kwargs.keys():
            kwargs.pop("block_size", None)
            sizes = block_sizes(kwargs["kv_cache_config"], kwargs["vllm_config"])
            kwargs.update({k: v for k, v in sizes.items() if accepts(wrapped, k)})
        return wrapped(*args, **kwargs)

    ledger.wrap(module, "Scheduler", scheduler)


PATCH = Patch(
    id="scheduler_init",
    summary="Gives the Scheduler the block sizes of the KV-cache groups the workers reported.",
    why="Required from 0.11.1; from 0.23 vLLM asserts that it divides the groups' sizes, which "
    "need not be the 16 that speculators writes.",
    upstream="vllm/v1/core/sched/scheduler.py, 0.11.1, 0.20.0; kv_cache_coordinator.py, 0.23.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators resolves block sizes as EngineCore does",
)
