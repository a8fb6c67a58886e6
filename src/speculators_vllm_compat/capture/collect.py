"""The driver's side: sends steps to the workers and puts their rows into sequences."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import WorkerError
from ..patches.rpc_reply import single_reply
from .steps import SequenceStates, fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from .ring import Ring


class Collector:
    """One call's steps and states.

    Args:
        executor: vLLM's.
        ring: Where rows arrive, or None when they come with the answers.
        layers: How many layers are captured.
        prompts: Token ids by request id.
    """

    def __init__(
        self, executor: Any, ring: Ring | None, layers: int, prompts: Mapping[str, list[int]]
    ) -> None:
        self._executor = executor
        self._ring = ring
        self._layers = layers
        self._prompts = prompts
        self._states: dict[str, SequenceStates] = {}
        self._step = 0
        self._launched: deque[dict[str, Any]] = deque()
        self._copies: dict[object, Future[list[str]]] = {}  # by slot
        # One thread: copies finish in the order of the steps, while this thread schedules.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hidden-states")
        self._timeout = _step_timeout()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def run(self, scheduler_output: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Execute a step; yields the sequences that are complete by now."""
        slot = None
        if self._ring is not None:
            slot = self._step % self._ring.plan.slots
            yield from self._free(slot)
        reply = self._ask("_run_capture_step", self._step, slot, scheduler_output)
        if reply["step"] != self._step:
            raise WorkerError(
                f"the worker answered for step {reply['step']}; expected step {self._step}. An "
                "earlier call was interrupted between a question and its answer. Create a new "
                "generator."
            )
        self._launched.append(reply)
        self._step += 1
        self._copy_arrived(reply["complete"])
        yield from self._finished(wait=False)

    def finish(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Wait for every step; yields the sequences that are left."""
        if self._launched:
            self._copy_arrived(self._ask("_finish_capture_steps")["complete"])
        yield from self._finished(wait=True)
        if self._states:
            name, states = next(iter(self._states.items()))
            raise RuntimeError(
                f"hidden states of {name}: {states.missing} of {len(states.prompt)} tokens were "
                "never computed; expected all of them. Report this with the vLLM release."
            )

    def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        reply: dict[str, Any] = single_reply(
            self._executor.collective_rpc(
                method, args=arguments, timeout=self._timeout, unique_reply_rank=0
            )
        )
        if reply["fault"]:
            raise RuntimeError(reply["fault"])
        return reply

    def _free(self, slot: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Wait until a slot's rows are copied."""
        if any(reply["slot"] == slot for reply in self._launched):
            self._copy_arrived(self._ask("_finish_capture_steps")["complete"])
        if slot in self._copies:
            yield from self._handed_over(self._copies.pop(slot))

    def _copy_arrived(self, complete: int) -> None:
        while self._launched and self._launched[0]["step"] <= complete:
            reply = self._launched.popleft()
            # Rows that came with the answer fill no slot, and are told apart from those that do.
            key = ("step", reply["step"]) if reply["slot"] is None else reply["slot"]
            self._copies[key] = self._thread.submit(self._copy, reply)

    def _copy(self, reply: dict[str, Any]) -> list[str]:
        """Put a step's rows where they belong; returns the sequences that became complete."""
        if reply["slot"] is None:
            ids, rows = reply["ids"], reply["rows"]
        else:
            assert self._ring is not None
            ids, rows = self._ring.slot(reply["slot"], reply["shape"])
        done = []
        for span in reply["spans"]:
            states = self._states.get(span.request_id)
            if states is None:
                prompt = self._prompts[span.request_id]
                states = self._states[span.request_id] = SequenceStates(prompt, self._layers)
            try:
                states.put(span, ids, rows)
            except ValueError as error:
                raise RuntimeError(fault(reply["step"], "its rows", error)) from error
            if not states.missing:
                done.append(span.request_id)
        return done

    def _finished(self, wait: bool) -> Iterator[tuple[str, list[torch.Tensor]]]:
        for key in list(self._copies):
            if wait or self._copies[key].done():
                yield from self._handed_over(self._copies.pop(key))

    def _handed_over(self, copy: Future[list[str]]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        for request_id in copy.result():
            states = self._states.pop(request_id, None)
            if states is not None:  # None: preempted and computed again, after it was complete
                yield request_id, states.complete()


def _step_timeout() -> float | None:
    """How long vLLM itself waits for a step, in seconds."""
    from vllm import envs

    return getattr(envs, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", None)
