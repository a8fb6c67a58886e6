"""Memory that the driver and the capturing worker share: a ring of slots, one step's rows each.

It is anonymous (memfd), so it has no name in /dev/shm, does not count against the size of that
mount, and is gone with the processes that hold it, however they end.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..patches.memory_query import host_memory
from ..switches import ring_bytes

if TYPE_CHECKING:
    from .steps import StepShape

logger = logging.getLogger("speculators_vllm_compat")

# Two steps may be on their way to the host while the driver copies a third; with a fourth slot
# the next step never waits for that copy.
SLOTS = 4
_ID_BYTES = 8
_PAGE = mmap.PAGESIZE
# At most this part of the host's free memory: the results need room as well.
_SHARE = 0.25


@dataclass(frozen=True)
class RingPlan:
    """The layout of a ring.

    Attributes:
        slots: How many steps it holds.
        tokens: The most tokens of a step.
        slot_bytes: The size of a slot: its token ids, then its rows.
    """

    slots: int
    tokens: int
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.slots * self.slot_bytes


def plan_ring(tokens: int, token_bytes: int, available: int, limit: int | None) -> RingPlan | None:
    """Size a ring, or None when not even one slot fits.

    Args:
        tokens: The most tokens of a step.
        token_bytes: The captured bytes of one token, over all layers.
        available: The host's free memory, in bytes.
        limit: The most bytes to use, or None for a share of the free memory.
    """
    ids = _aligned(tokens * _ID_BYTES)
    slot_bytes = ids + _aligned(tokens * token_bytes)
    room = int(available * _SHARE) if limit is None else limit
    slots = min(SLOTS, room // slot_bytes)
    return RingPlan(slots, tokens, slot_bytes) if slots else None


def _aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Ring:
    """The driver's end: makes the memory, and closes it when it is collected.

    Args:
        plan: Its layout.

    Raises:
        OSError: The system has no such memory to give.
    """

    def __init__(self, plan: RingPlan) -> None:
        self.plan = plan
        self.descriptor = os.memfd_create("speculators_vllm_compat", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, plan.total_bytes)
            self._memory = _mapped(self.descriptor, plan.total_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise

    def address(self) -> tuple[str, RingPlan]:
        """What a worker needs to open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}", self.plan

    def slot(self, index: int, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        return _views(self._memory, self.plan, index, shape)

    def __del__(self) -> None:
        if hasattr(self, "_memory"):
            del self._memory
            os.close(self.descriptor)


class RingEnd:
    """The worker's end, in pinned memory where there is a CUDA device.

    Args:
        path: As the driver's ``address()`` has it.
        plan: Likewise.
        device: Where the rows come from.
    """

    def __init__(self, path: str, plan: RingPlan, device: torch.device) -> None:
        self.plan = plan
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._memory = _mapped(descriptor, plan.total_bytes)
        finally:
            os.close(descriptor)
        if device.type == "cuda":
            self._pin()

    def slot(self, index: int, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        return _views(self._memory, self.plan, index, shape)

    def fits(self, shape: StepShape) -> bool:
        room = self.plan.slot_bytes - _aligned(self.plan.tokens * _ID_BYTES)
        return shape.tokens <= self.plan.tokens and shape.row_bytes <= room

    def _pin(self) -> None:
        # Copies into memory that is not pinned are right as well, and slower.
        status = torch.cuda.cudart().cudaHostRegister(
            self._memory.data_ptr(), self._memory.nbytes, 0
        )
        if int(status) != 0:
            logger.warning(
                "the memory shared with the driver could not be pinned (%s); capture is slower. "
                "Raise the limit on locked memory (ulimit -l).",
                status,
            )


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _views(
    memory: torch.Tensor, plan: RingPlan, index: int, shape: StepShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """A slot's token ids, int64 [tokens], and its rows, [layers, tokens, hidden]."""
    start = index * plan.slot_bytes
    ids = memory[start : start + shape.tokens * _ID_BYTES].view(torch.int64)
    start += _aligned(plan.tokens * _ID_BYTES)
    rows = memory[start : start + shape.row_bytes].view(shape.dtype)
    return ids, rows.view(shape.layers, shape.tokens, shape.hidden)


def make_ring(tokens: int, token_bytes: int) -> Ring | None:
    """A ring for a generator, or None where states must travel through the RPC instead.

    Args:
        tokens: The most tokens of a step.
        token_bytes: The captured bytes of one token, over all layers.
    """
    available, _total = host_memory()
    limit = ring_bytes()
    plan = plan_ring(tokens, token_bytes, available, limit)
    if plan is None:
        if limit != 0:
            logger.warning(
                "a step's hidden states take %.0f MB and the host has %.0f MB free: they are sent "
                "through vLLM's RPC instead of shared memory, which is slower. Lower "
                "max_num_batched_tokens, or free memory.",
                tokens * token_bytes / 1e6,
                available / 1e6,
            )
        return None
    try:
        return Ring(plan)
    except OSError as error:
        logger.warning(
            "no shared memory for hidden states (%s): they are sent through vLLM's RPC, which is "
            "slower.",
            error,
        )
        return None
