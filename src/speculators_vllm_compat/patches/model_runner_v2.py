"""Model runner V2: the batch of a step is not an attribute, and its order is another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patching import Finding, Patch, Sources
from ..probing import absent, at, misplaced, misreturned, needed, not_needed, unknown

if TYPE_CHECKING:
    import torch

_V1 = "v1.worker.gpu_model_runner"
_V2 = "v1.worker.gpu.model_runner"


class BatchV1:
    """The batch of a V1 runner, which keeps it in attributes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def request_ids(self) -> list[str]:
        """The requests in the order of their rows."""
        return list(self._runner.input_batch.req_ids)

    def token_ids(self, tokens: int) -> torch.Tensor:
        """The ids the step's rows were computed from, [tokens], until the next step."""
        buffer = self._runner.input_ids
        ids: torch.Tensor = getattr(buffer, "gpu", buffer)[:tokens]
        return ids

    def drop_logits(self) -> bool:
        """Leave a step without sampling; whether that is all that ends it."""
        if getattr(self._runner, "execute_model_state", None) is None:
            return False
        self._runner.execute_model_state = None
        return True


class BatchV2:
    """The batch of a V2 runner, which makes one each step and hands it on."""

    def __init__(self, runner: Any) -> None:
        self._current: Any = None
        prepare = runner.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            self._current = prepare(*args, **kwargs)
            return self._current

        runner.prepare_inputs = prepare_inputs

    def request_ids(self) -> list[str]:
        """The requests in the order of their rows."""
        return list(self._current.req_ids)

    def token_ids(self, tokens: int) -> torch.Tensor:
        """The ids the step's rows were computed from, [tokens], until the next step."""
        ids: torch.Tensor = self._current.input_ids[:tokens]
        return ids

    def drop_logits(self) -> bool:
        """Never: sampling is also where this runner counts the tokens it has computed."""
        return False


def batch_of(runner: Any) -> BatchV1 | BatchV2:
    """A view of a runner's batch of the current step.

    Raises:
        RuntimeError: The runner keeps its batch in neither known way.
    """
    if hasattr(runner, "input_batch") and hasattr(runner, "input_ids"):
        return BatchV1(runner)
    if hasattr(runner, "prepare_inputs"):
        return BatchV2(runner)
    raise RuntimeError(
        f"{type(runner).__module__}.{type(runner).__name__} has neither input_batch nor "
        "prepare_inputs; expected model runner V1 or V2. Report this with the vLLM release."
    )


def _unknown_v1(sources: Sources) -> Finding | None:
    """Why the batch of a V1 runner could not be read; None when it can."""
    module = sources.vllm.module(_V1)
    if module is None:
        return absent(sources.vllm, _V1, "GPUModelRunner")
    # Searched, not parsed: the file has seven thousand lines.
    forms = {
        "self.input_batch": r"self\.input_batch\b.*=",
        "self.input_ids": r"self\.input_ids\b.*=",
        "execute_model(scheduler_output)": r"def execute_model\(\s*self,\s*scheduler_output\b",
    }
    if missing := [name for name, form in forms.items() if not module.matches(form)]:
        return unknown(f"no {', '.join(missing)}", str(module.path), ", ".join(forms))
    batch = sources.vllm.module("v1.worker.gpu_input_batch")
    if batch is None or batch.line("InputBatch") is None:
        return absent(sources.vllm, "v1.worker.gpu_input_batch", "InputBatch")
    if not batch.matches(r"\breq_ids\b"):
        return unknown("no req_ids", at(batch, batch.line("InputBatch")), "InputBatch.req_ids")
    return None


def probe(sources: Sources) -> Finding:
    if problem := _unknown_v1(sources):
        return problem
    module = sources.vllm.module(_V2)
    line = module.line("GPUModelRunner") if module else None
    if module is None or line is None:
        return not_needed("there is no model runner V2", sources.vllm.where(_V2))
    name = "GPUModelRunner.prepare_inputs"
    if module.function(name) is None:
        return unknown("no prepare_inputs", at(module, line), name)
    if found := misreturned(module, name, "InputBatch"):
        return unknown(found, at(module, module.line(name)), f"{name} -> InputBatch")
    execute = module.function("GPUModelRunner.execute_model")
    if execute is None or (found := misplaced(execute, ("scheduler_output",))):
        return unknown(
            "no execute_model" if execute is None else found,
            at(module, line),
            "GPUModelRunner.execute_model(scheduler_output)",
        )
    batch = sources.vllm.module("v1.worker.gpu.input_batch")
    fields = batch.fields("InputBatch") if batch else None
    if batch is None or fields is None or not {"req_ids", "input_ids"} <= set(fields.names):
        return unknown(f"InputBatch{fields}", at(module, line), "fields req_ids and input_ids")
    return needed("model runner V2 has no input_batch", at(module, line))


PATCH = Patch(
    id="model_runner_v2",
    summary="Reads the order of a step's rows from the runner's own batch, V1 or V2.",
    why="Model runner V2, the default in stages from 0.22, sorts rows by scheduled tokens and has "
    "no input_batch: 0.4 raises, 0.3.0 gives rows to the wrong sequences.",
    upstream="vllm/v1/worker/gpu/model_runner.py, 0.12.0",
    process="worker",
    probe=probe,
    part_of="decoder_layer_call",
    removable="never, as long as speculators attributes rows itself",
)
