"""Takes the rows of a step from the device to the driver while the next step computes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .ring import RingEnd
    from .steps import StepShape

# Steps that may be under way at once; so many sets of device buffers there are.
IN_FLIGHT = 2


class DeviceRows:
    """Where a step's rows are collected on the device: two sets, used in turn.

    Args:
        layers: How many layers are captured.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._sets: list[torch.Tensor | None] = [None] * IN_FLIGHT

    def layer(self, step: int, index: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """The place of one layer's rows, [tokens, hidden].

        Args:
            step: The step's number.
            index: The layer's.
            tokens: How many rows.
            like: A tensor of the rows' width, dtype and device.
        """
        buffer = self._sets[step % IN_FLIGHT]
        width = like.shape[-1]
        if buffer is None or buffer.shape[1] < tokens or buffer.shape[2] != width:
            self._sets[step % IN_FLIGHT] = None  # freed before the larger one is made
            buffer = like.new_empty((self._layers, tokens, width))
            self._sets[step % IN_FLIGHT] = buffer
        return buffer[index, :tokens]

    def all(self, step: int, tokens: int) -> torch.Tensor:
        """[layers, tokens, hidden] of a step."""
        buffer = self._sets[step % IN_FLIGHT]
        assert buffer is not None
        return buffer[:, :tokens]


class Transfer:
    """Copies steps into the ring, on a stream of its own where there is a CUDA device."""

    def __init__(self) -> None:
        self.ring: RingEnd | None = None
        self._stream: torch.cuda.Stream | None = None
        self._under_way: deque[tuple[int, Any]] = deque()
        self._copied: dict[int, Any] = {}
        self._complete = -1

    def wait_for_buffers(self, step: int) -> None:
        """Keep this step's rows, on the device, from overwriting those still being copied."""
        event = self._copied.pop(step % IN_FLIGHT, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def send(
        self, step: int, slot: int, shape: StepShape, rows: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Start copying a step's rows and ids into a slot."""
        assert self.ring is not None
        to_ids, to_rows = self.ring.slot(slot, shape)
        if rows.device.type != "cuda":
            to_ids.copy_(ids)
            to_rows.copy_(rows)
            self._complete = step
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to_ids.copy_(ids, non_blocking=True)
            for source, target in zip(rows, to_rows, strict=True):  # each one contiguous
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        ids.record_stream(self._stream)
        self._copied[step % IN_FLIGHT] = event
        self._under_way.append((step, event))

    def complete(self, leave: int = 0) -> int:
        """Wait until no more than ``leave`` copies are under way; the last step that arrived."""
        while len(self._under_way) > leave:
            step, event = self._under_way.popleft()
            event.synchronize()
            self._complete = step
        return self._complete

    def reset(self) -> None:
        """Wait for what is under way, and begin with step 0 again."""
        self.complete()
        self._copied.clear()
        self._complete = -1
