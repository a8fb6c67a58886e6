"""Block hasher injection: every Request can hash its blocks, as EngineCore's requests can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, GENERATOR_CLASS, Finding, Ledger, Patch, Sources
from ..probing import absent, at, misreturned, needed, not_needed, unfit, unknown
from .hashing_location import locate
from .none_hash import configured_hash

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_KV_UTILS = "v1.core.kv_cache_utils"


def build_block_hasher(vllm_config: Any) -> Callable[[Any], list[Any]]:
    """A block hasher for the configured algorithm and block size, built as EngineCore does.

    Returns:
        A function from a Request to the hashes of its full blocks that have none yet.
    """
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    hasher: Callable[[Any], list[Any]] = get_request_block_hasher(
        vllm_config.cache_config.block_size, configured_hash(vllm_config)
    )
    return hasher


def probe(sources: Sources) -> Finding:
    generator = sources.generator
    if generator is None:
        return absent(sources.speculators, "data_generation.vllm_hidden_states_generator", "it")
    module = sources.vllm.module(_KV_UTILS)
    signature = module.function("get_request_block_hasher") if module else None
    if module is None or signature is None:
        return absent(sources.vllm, _KV_UTILS, "get_request_block_hasher")
    size, *rest = [p.name for p in signature.parameters if not p.keyword_only] or [""]
    known = size in {"block_size", "hash_block_size"} and rest[:1] == ["caching_hash_fn"]
    problem = unfit(signature, {size, "caching_hash_fn"}) or ("" if known else str(signature))
    problem = problem or misreturned(
        module, "get_request_block_hasher", "Callable[[Request], list[BlockHash]]"
    )
    if problem:
        where = at(module, signature.line)
        return unknown(problem, where, "(block_size or hash_block_size, caching_hash_fn)")
    located = locate(sources)
    if isinstance(located, Finding):
        return located
    calls = generator.calls("Request")
    if calls and "block_hasher" in calls[0].keywords:
        return not_needed("speculators passes a block_hasher", at(generator, calls[0].line))
    return needed(
        "speculators builds requests without a block_hasher",
        at(generator, calls[0].line if calls else None),
    )


def apply(module: ModuleType, ledger: Ledger) -> None:
    def init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        instance.block_hasher = build_block_hasher(instance.vllm_config)

    ledger.wrap(getattr(module, GENERATOR_CLASS), "__init__", init)


PATCH = Patch(
    id="block_hasher",
    summary="Gives the generator a block_hasher and every Request it builds that hasher.",
    why="With prefix caching, vLLM asserts that a request's full blocks are hashed; 0.3.0 builds "
    "requests that cannot hash: assert len(request.block_hashes) >= num_full_blocks.",
    upstream="vllm/v1/core/block_pool.py cache_full_blocks, 0.12.0; vllm/v1/engine/core.py",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators 0.3.0 is no longer supported",
)
