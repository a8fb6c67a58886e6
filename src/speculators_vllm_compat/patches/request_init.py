"""Request arguments: ``eos_token_id`` was required up to vLLM 0.16 and is refused from 0.17."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..calls import accepts
from ..patching import GENERATOR, Finding, Ledger, Patch, Sources
from ..probing import absent, at, needed, not_needed, unfit, unknown

if TYPE_CHECKING:
    from types import ModuleType

_ALWAYS = {
    "request_id",
    "prompt_token_ids",
    "sampling_params",
    "pooling_params",
    "arrival_time",
    "block_hasher",
}


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module("v1.request")
    signature = module.function("Request.__init__") if module else None
    if module is None or signature is None:
        return absent(sources.vllm, "v1.request", "Request.__init__")
    where = at(module, signature.line)
    problem = unfit(signature, _ALWAYS, {"eos_token_id"})
    if problem:
        return unknown(problem, where, f"{sorted(_ALWAYS)}, with or without eos_token_id")
    init, read = "Request.__init__", ("request_id", "num_prompt_tokens", "num_computed_tokens")
    unset = [name for name in read if not module.mentions(init, f"self.{name} = ")]
    if unset and not module.is_stub(init):
        return unknown(f"Request sets no {', '.join(unset)}", where, f"attributes {read}")
    stopped = module.line("RequestStatus") is None or module.mentions(
        "RequestStatus", "FINISHED_ABORTED"
    )
    if not stopped:
        line = at(module, module.line("RequestStatus"))
        return unknown("RequestStatus without FINISHED_ABORTED", line, "FINISHED_ABORTED")
    if signature.accepts("eos_token_id"):
        return not_needed("Request takes eos_token_id", where)
    return needed("Request takes no eos_token_id", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    def request(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        if not accepts(wrapped, "eos_token_id"):
            kwargs = {k: v for k, v in kwargs.items() if k != "eos_token_id"}
        return wrapped(*args, **kwargs)

    ledger.wrap(module, "Request", request)


PATCH = Patch(
    id="request_init",
    summary="Leaves eos_token_id out of Request where vLLM takes it from the sampling parameters.",
    why="vLLM 0.17 removed the parameter; speculators passes it, so every generate() raises.",
    upstream="vllm/v1/request.py, 0.17.0",
    process="driver",
    probe=probe,
    target=GENERATOR,
    apply=apply,
    removable="when vLLM below 0.17 is no longer supported by speculators, which then drops it",
)
