"""Observes the decoder's layers during the runner's steps and takes their rows.

A failure in here is never raised inside the model's forward: with several ranks, one that
stops there leaves the others waiting in a collective. The first failure is kept, and told with
the step's answer, or when the states are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..patches.model_runner_v2 import batch_of
from .residual import residual_stream
from .steps import SequenceStates, StepShape, fault, spans
from .transfer import DeviceRows, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence


class Observer:
    """Captures hidden states of one model runner.

    Args:
        runner: The worker's model runner, V1 or V2.
        decoder: The module that holds ``layers``.
        layer_ids: The layers whose output is captured, each once.
    """

    def __init__(self, runner: Any, decoder: Any, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self.batch = batch_of(runner)
        self.transfer = Transfer()
        self._decoder = decoder
        self._rows = DeviceRows(len(self.layer_ids))
        self._step = -1
        self._tokens = 0
        self._seen: set[int] = set()
        self._states: dict[str, SequenceStates] = {}
        self._fault: str | None = None
        self._streamed = False
        self._slot: int | None = None
        self._answer: dict[str, Any] = {}
        self._wrap_execute(runner)

    def observe_layers(self) -> None:
        """Watch the layers' outputs while the model's own forward runs."""
        for layer_id in self.layer_ids:
            self._decoder.layers[layer_id].register_forward_hook(self._hook(layer_id))

    def reset(self) -> None:
        """Forget everything captured, and any failure."""
        self.transfer.reset()
        self._states.clear()
        self._seen.clear()
        self._fault = None
        self._step = -1
        self._streamed = False

    def stream_to(self, step: int, slot: int | None) -> None:
        """Send the coming step to the driver, instead of keeping it for ``results``.

        Args:
            step: Its number in the call, from 0.
            slot: The ring's slot, or None to send the rows with the answer.
        """
        self._streamed = True
        self._slot = slot
        self._answer = {"step": step, "slot": None, "spans": [], "shape": None}

    def report(self, leave: int) -> dict[str, Any]:
        """What the driver is told about the step sent last.

        Args:
            leave: How many steps may still be on their way to the ring.

        Returns:
            ``step``, its ``slot``, ``spans`` and ``shape``; ``ids`` and ``rows`` themselves when
            there is no slot; ``complete``, the last step whose rows have arrived; ``fault``.
        """
        complete = self.transfer.complete(leave)
        if "rows" in self._answer:  # sent along, and after all that went through the ring
            self.transfer.complete()
            complete = self._answer["step"]
        answer = {**self._answer, "complete": complete, "fault": self._fault}
        self._answer = {}
        return answer

    def store(self, layer_id: int, output: Any) -> None:
        """Take one layer's output of the running step."""
        if not self._tokens or self._fault:  # a warm-up run, or nothing left to rescue
            return
        try:
            if layer_id in self._seen:
                raise ValueError(f"layer {layer_id} ran twice; expected once a step")
            if not self._seen:
                self.transfer.wait_for_buffers(self._step)
            index = self.layer_ids.index(layer_id)
            residual_stream(
                output,
                self._tokens,
                lambda like: self._rows.layer(self._step, index, self._tokens, like),
            )
            self._seen.add(layer_id)
        except Exception as error:
            self._fault = fault(self._step, f"layer {layer_id}", error)

    def results(self) -> dict[str, list[torch.Tensor]] | None:
        """The states of steps that were not streamed, by request id; None when there were none.

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
            self._seen.clear()
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
            missing = [i for i in self.layer_ids if i not in self._seen]
            if missing:
                raise ValueError(f"layers {missing} did not run; expected each once a step")
            found = spans(scheduler_output, self.batch.request_ids())
            rows = self._rows.all(self._step, self._tokens)
            # A copy: the runner writes the next step's ids to the same place.
            ids = self.batch.token_ids(self._tokens).to(torch.int64, copy=True)
            if self._streamed:
                self._send(found, rows, ids)
            else:
                self._keep(scheduler_output, found, rows, ids)
        except Exception as error:
            self._fault = fault(self._step, "its rows", error)

    def _send(self, found: list[Any], rows: torch.Tensor, ids: torch.Tensor) -> None:
        layers, tokens, hidden = rows.shape
        shape = StepShape(layers, tokens, hidden, rows.dtype)
        self._answer |= {"spans": found, "shape": shape}
        ring = self.transfer.ring
        if self._slot is not None and ring is not None and ring.fits(shape):
            self._answer["slot"] = self._slot
            self.transfer.send(self._step, self._slot, shape, rows, ids)
        else:
            self._answer |= {"ids": ids.cpu(), "rows": rows.cpu().clone()}

    def _keep(
        self, scheduler_output: Any, found: list[Any], rows: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Hold a step's rows here, for a driver that asks for all of them at the end."""
        for new in scheduler_output.scheduled_new_reqs:
            states = SequenceStates(new.prompt_token_ids, len(self.layer_ids))
            self._states[new.req_id] = states
        host_ids = ids.cpu()
        for span in found:
            self._states[span.request_id].put(span, host_ids, rows)
