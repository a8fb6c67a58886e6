"""Execute and sample: from 0.11.1 a step is two calls of the executor."""

from __future__ import annotations

from typing import Any

from ..patching import Finding, Patch, Sources
from ..probing import absent, at, misplaced, needed, not_needed, unknown

_EXECUTOR = "v1.executor.multiproc_executor"


def end_step(worker: Any, batch: Any, output: Any) -> None:
    """End a step whose sampled tokens nobody wants.

    Args:
        worker: The vLLM worker.
        batch: The view of its runner's batch.
        output: What its ``execute_model`` returned: None when sampling is a call of its own. The
            runner then holds the step's logits, and a second ``execute_model`` raises.
    """
    if output is None and not batch.drop_logits():
        worker.sample_tokens(None)


def probe(sources: Sources) -> Finding:
    module = sources.vllm.module(_EXECUTOR)
    execute = module.function("MultiprocExecutor.execute_model") if module else None
    if module is None or execute is None:
        return absent(sources.vllm, _EXECUTOR, "MultiprocExecutor.execute_model")
    if problem := misplaced(execute, ("scheduler_output",)):
        return unknown(problem, at(module, execute.line), "execute_model(scheduler_output)")
    sample = module.function("MultiprocExecutor.sample_tokens")
    generator = sources.generator
    calls = bool(generator and generator.calls("sample_tokens"))
    runner = sources.vllm.module("v1.worker.gpu_model_runner")
    if sample is None and runner is not None and runner.matches(r"def sample_tokens\("):
        expected = "MultiprocExecutor.sample_tokens, which the model runner has"
        return unknown("no sample_tokens", at(module, execute.line), expected)
    returned = module.returns("MultiprocExecutor.execute_model")
    if sample is not None and (returned.startswith("tuple") or "None" not in (returned or "None")):
        found = f"execute_model returns {returned}"
        return unknown(found, at(module, execute.line), "None while there is something to sample")
    if sample is None:
        where = at(module, execute.line)
        if calls:
            return needed("execute_model samples, and speculators samples again", where)
        return not_needed("execute_model samples", where)
    where = at(module, sample.line)
    if problem := misplaced(sample, ("grammar_output",)):
        return unknown(problem, where, "sample_tokens(grammar_output)")
    if calls:
        return not_needed("speculators calls sample_tokens", where)
    return needed("sampling is a call of its own, which speculators does not make", where)


PATCH = Patch(
    id="execute_sample",
    summary="Ends a step without sampling where the runner allows it, or samples where it must.",
    why="vLLM 0.11.1 split the step; 0.3.0 never samples (State error: sample_tokens() must be "
    "called), and 0.4 always does, which 0.11.0 does not know.",
    upstream="vllm/v1/executor/multiproc_executor.py, 0.11.1",
    process="worker",
    probe=probe,
    part_of="generate_loop",
    removable="when speculators 0.3.0 and vLLM 0.11.0 are no longer supported",
)
