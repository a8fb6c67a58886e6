"""RPC replies: a call with one replying rank returned a list of one in 0.11.0, the reply since."""

from __future__ import annotations

from typing import Any

from ..patching import Finding, Patch, Sources
from ..probing import absent, at, misplaced, needed, not_needed, unfit, unknown

_EXECUTOR = "v1.executor.multiproc_executor"
_NAME = "MultiprocExecutor.collective_rpc"


def single_reply(reply: Any) -> Any:
    """The reply of the one rank that was asked, a dict of states, in either form."""
    return reply[0] if isinstance(reply, list) else reply


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module(_EXECUTOR)
    signature = module.function(_NAME) if module else None
    if module is None or signature is None:
        return absent(sources.vllm, _EXECUTOR, _NAME)
    where = at(module, signature.line)
    problem = misplaced(signature, ("method",))
    if problem := problem or unfit(signature, {"method", "args", "unique_reply_rank"}):
        return unknown(problem, where, "(method, args, unique_reply_rank)")
    returns_reply = module.mentions(_NAME, "responses[0]")
    if not returns_reply and not module.mentions(_NAME, "return responses"):
        return unknown("a body of another form", where, "a return of responses or responses[0]")
    worker = sources.custom_worker
    wants_list = worker is not None and not worker.function(
        "HiddenStatesWorkerExtension._set_request_metadata"
    )  # 0.3.0, which indexes the reply
    if returns_reply == wants_list:
        form = "the reply" if returns_reply else "a list of one"
        return needed(f"one replying rank gives {form}", where)
    return not_needed("the reply has the form speculators expects", where)


PATCH = Patch(
    id="rpc_reply",
    summary="Reads a step's answer from either form of a single rank's reply.",
    why="vLLM 0.11.1 returns the reply itself, which 0.3.0 indexes: the first layer instead of "
    "the list of layers; 0.11.0 returns a list of one, where 0.4 expects a dict.",
    upstream="vllm/v1/executor/multiproc_executor.py collective_rpc, 0.11.1",
    process="driver",
    probe=probe,
    part_of="generate_loop",
    removable="when speculators 0.3.0 and vLLM 0.11.0 are no longer supported",
)
