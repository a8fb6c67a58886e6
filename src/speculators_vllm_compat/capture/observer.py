"""Observes the decoder's layers during the runner's steps and keeps the rows on the host.

A failure in here is never raised inside the model's forward: with several ranks, one that
stops there leaves the others waiting in a collective. The first failure is kept, and raised
when the states are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patches.model_runner_v2 import batch_of
from .residual import residual_stream
from .steps import SequenceStates, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Observer:
    """Captures hidden states of one model runner.

    Args:
        runner: The worker's model runner, V1 or V2.
        decoder: The module that holds ``layers``.
        layer_ids: The layers whose output is captured, each once.
    """

    def __init__(self, runner: Any, decoder: Any, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._batch = batch_of(runner)
        self._decoder = decoder
        self._step = 0
        self._tokens = 0
        self._rows: dict[int, torch.Tensor] = {}
        self._states: dict[str, SequenceStates] = {}
        self._fault: str | None = None
        self._wrap_execute(runner)

    def observe_layers(self) -> None:
        """Watch the layers' outputs while the model's own forward runs."""
        for layer_id in self.layer_ids:
            self._decoder.layers[layer_id].register_forward_hook(self._hook(layer_id))

    def reset(self) -> None:
        """Forget everything captured, and any failure."""
        self._states.clear()
        self._rows.clear()
        self._fault = None
        self._step = 0

    def store(self, layer_id: int, output: Any) -> None:
        """Take one layer's output of the running step."""
        if not self._tokens or self._fault:  # a warm-up run, or nothing left to rescue
            return
        try:
            if layer_id in self._rows:
                raise ValueError(f"layer {layer_id} ran twice; expected once a step")
            self._rows[layer_id] = residual_stream(output, self._tokens)
        except Exception as error:
            self._fail(error, f"layer {layer_id}")

    def results(self) -> dict[str, list[torch.Tensor]] | None:
        """The captured states by request id, one tensor a layer; None when nothing ran.

        Raises:
            RuntimeError: Something captured was not what was scheduled; names the step.
        """
        if self._fault:
            raise RuntimeError(self._fault)
        if not self._states:
            return None
        done = {}
        for request_id, states in self._states.items():
            try:
                done[request_id] = states.complete()
            except ValueError as error:
                raise RuntimeError(f"hidden states of {request_id}: {error}") from error
        self._states = {}
        return done

    def _hook(self, layer_id: int) -> Any:
        def observe(_layer: Any, _args: Any, output: Any) -> None:
            self.store(layer_id, output)

        return observe

    def _wrap_execute(self, runner: Any) -> None:
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            real = not kwargs.get("dummy_run")
            self._tokens = scheduler_output.total_num_scheduled_tokens if real else 0
            self._step += bool(self._tokens)
            self._rows.clear()
            try:
                result = execute(scheduler_output, *args, **kwargs)
                if self._tokens:
                    self._finish_step(scheduler_output)
            finally:
                self._tokens = 0
            return result

        runner.execute_model = execute_model

    def _finish_step(self, scheduler_output: Any) -> None:
        if self._fault:
            return
        try:
            missing = [i for i in self.layer_ids if i not in self._rows]
            if missing:
                raise ValueError(f"layers {missing} did not run; expected each once a step")
            for new in scheduler_output.scheduled_new_reqs:
                states = SequenceStates(new.prompt_token_ids, len(self.layer_ids))
                self._states[new.req_id] = states
            token_ids = self._batch.token_ids(self._tokens)
            rows = [self._rows[i] for i in self.layer_ids]
            for span in spans(scheduler_output, self._batch.request_ids()):
                self._states[span.request_id].put(span, token_ids, rows)
        except Exception as error:
            self._fail(error, "its rows")
        self._rows.clear()

    def _fail(self, error: Exception, what: str) -> None:
        self._fault = (
            f"hidden states of step {self._step}, {what}: {error}. The call's states are dropped "
            "rather than returned wrong. Report this with the model's name and the vLLM release."
        )
