"""One step of the model runner: which rows of the batch belong to which tokens of which request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Span:
    """Consecutive rows of a step that belong to one request.

    Attributes:
        request_id: The request.
        row: The first row in the batch.
        start: The position in the prompt of that row's token.
        count: How many rows.
    """

    request_id: str
    row: int
    start: int
    count: int


@dataclass(frozen=True)
class StepShape:
    """The form of a step's rows, [layers, tokens, hidden]."""

    layers: int
    tokens: int
    hidden: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """The size of all rows."""
        size: int = self.layers * self.tokens * self.hidden * self.dtype.itemsize
        return size


def computed_before(scheduler_output: Any) -> dict[str, int]:
    """How many tokens of each scheduled request earlier steps computed."""
    cached = scheduler_output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update({r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs})
    return before


def spans(scheduler_output: Any, batch_order: list[str]) -> list[Span]:
    """The rows of a step, in the order the runner laid them out.

    Args:
        scheduler_output: What the scheduler sent for the step.
        batch_order: The request ids in the runner's own batch of this step.

    Raises:
        ValueError: The batch and the scheduler disagree about who is in the step.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    order = [request_id for request_id in batch_order if request_id in scheduled]
    if len(order) != len(scheduled) or len(set(order)) != len(order):
        raise ValueError(
            f"the runner's batch holds {batch_order}; expected each of the scheduled "
            f"{sorted(scheduled)} once"
        )
    before = computed_before(scheduler_output)
    found, row = [], 0
    for request_id in order:
        count = scheduled[request_id]
        found.append(Span(request_id, row, before[request_id], count))
        row += count
    if row != scheduler_output.total_num_scheduled_tokens:
        raise ValueError(
            f"the requests add up to {row} tokens; expected the "
            f"{scheduler_output.total_num_scheduled_tokens} of the step"
        )
    return found


class SequenceStates:
    """The hidden states of one request, filled in as its tokens are computed.

    Args:
        prompt: The request's token ids.
        layers: How many layers are captured.
    """

    def __init__(self, prompt: list[int], layers: int) -> None:
        self.prompt = torch.tensor(prompt, dtype=torch.long)
        self._filled = torch.zeros(len(prompt), dtype=torch.bool)
        self._layers: list[torch.Tensor | None] = [None] * layers

    @property
    def missing(self) -> int:
        """How many of the prompt's tokens have no rows yet."""
        return len(self.prompt) - int(self._filled.sum())

    def put(self, span: Span, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Store a step's rows, after checking that they were computed from this prompt.

        A request that was preempted is computed again from its start; its rows are overwritten.

        Args:
            span: Which rows.
            token_ids: The ids the step's rows were computed from, [tokens], on the host.
            rows: [layers, tokens, hidden], on any device.

        Raises:
            ValueError: The rows' tokens are not the prompt's.
        """
        stop = span.start + span.count
        expected = self.prompt[span.start : stop]
        found = token_ids[span.row : span.row + span.count].to(expected.dtype)
        if not found.equal(expected):
            raise ValueError(
                f"rows {span.row} to {span.row + span.count - 1} were computed from tokens "
                f"{_shown(found)}; expected tokens {span.start} to {stop - 1} of the prompt, "
                f"{_shown(expected)}"
            )
        for index, layer in enumerate(rows):
            target = self._layers[index]
            if target is None:
                shape = (len(self.prompt), layer.shape[1])
                target = self._layers[index] = layer.new_empty(shape, device="cpu")
            target[span.start : stop].copy_(layer[span.row : span.row + span.count])
        self._filled[span.start : stop] = True

    def complete(self) -> list[torch.Tensor]:
        """Hand over one [tokens, hidden] tensor a layer; they are not kept.

        Raises:
            ValueError: Some of the prompt's tokens were never computed.
        """
        if self.missing:
            raise ValueError(
                f"{self.missing} of {len(self.prompt)} tokens were never computed; expected all "
                "of them"
            )
        layers, self._layers = self._layers, []
        return [layer for layer in layers if layer is not None]


def fault(step: int, what: str, error: Exception) -> str:
    """What is told when a step's rows are not what was scheduled."""
    return (
        f"hidden states of step {step + 1}, {what}: {error}. The call's states are dropped "
        "rather than returned wrong. Report this with the model's name and the vLLM release."
    )


def _shown(ids: torch.Tensor) -> str:
    head = ids[:6].tolist()
    return f"{head}" if len(ids) <= 6 else f"{head[:-1]}, ... ({len(ids)} in all)"
