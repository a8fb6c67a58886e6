"""SchedulerConfig: ``is_encoder_decoder`` came in 0.11.1 and is required from 0.12."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..calls import accepts
from ..patching import GENERATOR, Finding, Ledger, Patch, Sources
from ..probing import absent, at, needed, not_needed, unfit, unknown

if TYPE_CHECKING:
    from types import ModuleType

_ALWAYS = {"max_num_seqs", "max_model_len", "max_num_batched_tokens"}


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module("config.scheduler")
    fields = module.fields("SchedulerConfig") if module else None
    if module is None or fields is None:
        return absent(sources.vllm, "config.scheduler", "SchedulerConfig")
    where = at(module, fields.line)
    if problem := unfit(fields, _ALWAYS, {"is_encoder_decoder"}):
        return unknown(problem, where, f"{sorted(_ALWAYS)}, with or without is_encoder_decoder")
    generator = sources.generator
    calls = generator.calls("SchedulerConfig") if generator else ()
    passed = any("is_encoder_decoder" in call.keywords for call in calls)
    if passed and not fields.accepts("is_encoder_decoder"):
        return needed("SchedulerConfig takes no is_encoder_decoder", where)
    if not passed and "is_encoder_decoder" in fields.required:
        return needed("SchedulerConfig requires is_encoder_decoder", where)
    return not_needed("SchedulerConfig takes what speculators passes", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    def scheduler_config(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        if not accepts(wrapped, "is_encoder_decoder"):
            kwargs = {k: v for k, v in kwargs.items() if k != "is_encoder_decoder"}
        else:
            kwargs.setdefault("is_encoder_decoder", False)
        return wrapped(*args, **kwargs)

    ledger.wrap(module, "SchedulerConfig", scheduler_config)


PATCH = Patch(
    id="scheduler_config",
    summary="Passes is_encoder_decoder=False to SchedulerConfig where vLLM takes it.",
    why="vLLM 0.12 made the argument required; 0.3.0 does not pass it, 0.4 always does.",
    upstream="vllm/config/scheduler.py, 0.11.1 and 0.12.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when speculators 0.3.0 and vLLM below 0.11.1 are no longer supported",
)
