"""KV-cache helpers: ``get_kv_cache_config_from_groups`` lost ``kv_cache_specs`` in 0.12."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..calls import accepts
from ..patching import GENERATOR, Finding, Ledger, Patch, Sources
from ..probing import at, needed, not_needed, unfit, unknown
from .kv_cache_location import locate

if TYPE_CHECKING:
    from types import ModuleType

_NAME = "get_kv_cache_config_from_groups"
_ALWAYS = {"vllm_config", "kv_cache_groups", "available_memory"}


def probe(sources: Sources) -> Finding:
    located = locate(sources, _NAME)
    if isinstance(located, Finding):
        return located
    signature = located.function(_NAME)
    assert signature is not None
    where = at(located, signature.line)
    if problem := unfit(signature, _ALWAYS, {"kv_cache_specs"}):
        return unknown(problem, where, f"{sorted(_ALWAYS)}, with or without kv_cache_specs")
    generator = sources.generator
    calls = generator.calls(_NAME) if generator else ()
    passed = any("kv_cache_specs" in call.keywords for call in calls)
    takes = signature.accepts("kv_cache_specs")
    if passed and not takes:
        return needed(f"{_NAME} takes no kv_cache_specs", where)
    if not passed and "kv_cache_specs" in signature.required:
        return needed(f"{_NAME} requires kv_cache_specs", where)
    return not_needed(f"{_NAME} takes what speculators passes", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    def config_from_groups(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        if not accepts(wrapped, "kv_cache_specs"):
            kwargs.pop("kv_cache_specs", None)
        elif "kv_cache_specs" not in kwargs:
            kwargs["kv_cache_specs"] = {
                layer: group.kv_cache_spec
                for group in kwargs["kv_cache_groups"]
                for layer in group.layer_names
            }
        return wrapped(*args, **kwargs)

    ledger.wrap(module, _NAME, config_from_groups)


PATCH = Patch(
    id="kv_cache_arguments",
    summary="Drops or fills in kv_cache_specs when the KV-cache configuration is built.",
    why="vLLM 0.12 removed the parameter that 0.3.0 passes; before, it is required, but 0.4 omits "
    "it.",
    upstream="vllm/v1/core/kv_cache_utils.py, 0.12.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators 0.3.0 and vLLM below 0.12 are no longer supported",
)
