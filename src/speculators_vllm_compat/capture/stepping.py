"""Runs scheduled steps in a worker, one behind the other, without waiting for the device.

One step is one RPC. The worker answers as soon as the step is launched, so the next one is
scheduled and prepared while this one computes. Nothing is sampled where vLLM can do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..patches.execute_sample import end_step
from ..patches.model_runner_v2 import batch_of
from .transfer import IN_FLIGHT

if TYPE_CHECKING:
    from .observer import Observer


class Stepper:
    """The steps of one worker.

    Args:
        worker: The vLLM worker.
        decoder: The module that holds the layers.
        observer: What captures, on the rank that does.
    """

    def __init__(self, worker: Any, decoder: torch.nn.Module, observer: Observer | None) -> None:
        self._worker = worker
        self._batch = observer.batch if observer is not None else batch_of(worker.model_runner)
        self._observer = observer
        self._inputs = _InputGuard(decoder)

    def run(self, step: int, slot: int | None, scheduler_output: Any) -> dict[str, Any] | None:
        """Launch one step.

        Args:
            step: Its number in the call, from 0.
            slot: The slot of the ring its rows go to; None to send them with the answer.
            scheduler_output: As the scheduler made it.

        Returns:
            What the driver needs to know, on the rank that captures; see ``Observer.report``.
        """
        self._inputs.wait()
        if self._observer is not None:
            self._observer.stream_to(step, slot)
        end_step(self._worker, self._batch, self._worker.execute_model(scheduler_output))
        return None if self._observer is None else self._observer.report(leave=IN_FLIGHT)

    def finish(self) -> dict[str, Any] | None:
        """Wait for every step; the last answer of a call."""
        return None if self._observer is None else self._observer.report(leave=0)


class _InputGuard:
    """Keeps a step's preparation from overwriting inputs that the one before has yet to read.

    The runner prepares a step in pinned memory that it copies to the device without waiting.
    Sampling used to wait for the device, and so for that copy; without it, an event does, which
    is recorded when the decoder starts and so after all of the copies.
    """

    def __init__(self, decoder: torch.nn.Module) -> None:
        self._event: torch.cuda.Event | None = None
        parameter = next(decoder.parameters(), None)
        if parameter is not None and parameter.device.type == "cuda":
            decoder.register_forward_pre_hook(self._record)

    def _record(self, _decoder: Any, _args: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
