"""init_none_hash: the root of every chain of block hashes must exist before a hasher does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import GENERATOR, GENERATOR_CLASS, Finding, Ledger, Patch, Sources
from ..probing import absent, at, misplaced, misreturned, needed, not_needed, unknown

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def configured_hash(vllm_config: Any) -> Callable[[Any], bytes]:
    """The hash function the cache configuration names, as EngineCore looks it up."""
    from vllm.utils.hashing import get_hash_fn_by_name

    found: Callable[[Any], bytes] = get_hash_fn_by_name(
        vllm_config.cache_config.prefix_caching_hash_algo
    )
    return found


def ensure_none_hash(hash_function: Callable[[Any], bytes]) -> None:
    """Set vLLM's NONE_HASH with a hash function, once in this process for each function.

    vLLM itself reads PYTHONHASHSEED there. A second generator leaves the root alone, so that
    hashes made before it stay valid.
    """
    from vllm.v1.core import kv_cache_utils

    if _initialised.get(hash_function) is not getattr(kv_cache_utils, "NONE_HASH", None) or (
        hash_function not in _initialised
    ):
        kv_cache_utils.init_none_hash(hash_function)
        _initialised.clear()
        _initialised[hash_function] = kv_cache_utils.NONE_HASH


# The function that was used last, and the root it gave: another user of vLLM in this process
# may have set a different one since.
_initialised: dict[Callable[[Any], bytes], bytes] = {}


def probe(sources: Sources) -> Finding:
    generator = sources.generator
    module = sources.vllm.module("v1.core.kv_cache_utils")
    if generator is None:
        return absent(sources.speculators, "data_generation.vllm_hidden_states_generator", "it")
    if module is None or not module.binds("NONE_HASH"):
        return absent(sources.vllm, "v1.core.kv_cache_utils", "NONE_HASH")
    signature = module.function("init_none_hash")
    if signature is None:
        return absent(sources.vllm, "v1.core.kv_cache_utils", "init_none_hash")
    problem = misplaced(signature, ("hash_fn",)) or misreturned(module, "init_none_hash", "None")
    sets = module.is_stub("init_none_hash") or module.mentions("init_none_hash", "global NONE_HASH")
    if not problem and not sets:
        problem = "init_none_hash does not set NONE_HASH"
    if problem:
        expected = "init_none_hash(hash_fn), which sets the global NONE_HASH"
        return unknown(problem, at(module, signature.line), expected)
    calls = generator.calls("init_none_hash")
    if calls:
        return not_needed("speculators calls init_none_hash", at(generator, calls[0].line))
    return needed("speculators never calls init_none_hash", str(generator.path))


def apply(module: ModuleType, ledger: Ledger) -> None:
    def init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        ensure_none_hash(configured_hash(instance.vllm_config))

    ledger.wrap(getattr(module, GENERATOR_CLASS), "__init__", init)


PATCH = Patch(
    id="none_hash",
    summary="Sets vLLM's NONE_HASH with the configured hash function before any block is hashed.",
    why="NONE_HASH has no value until init_none_hash runs, which EngineCore does and 0.3.0 does "
    "not; the first hashed block would raise.",
    upstream="vllm/v1/core/kv_cache_utils.py, every release; vllm/v1/engine/core.py",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators 0.3.0 is no longer supported",
)
