"""Each boundary's tests run inside one pair's environment, against its real sources and classes."""

from __future__ import annotations

import functools

import pytest
import torch

from speculators_vllm_compat.patches import PATCHES
from speculators_vllm_compat.patching import Finding, Patch
from speculators_vllm_compat.plan import make_plan

# A thread pool that exists before a fork leaves the child's OpenMP waiting for ever.
torch.set_num_threads(1)


@functools.cache
def _decisions() -> dict[str, tuple[Patch, Finding]]:
    return {d.patch.id: (d.patch, d.finding) for d in make_plan().decisions}


@pytest.fixture(scope="session")
def patch_named():
    """A patch by its id."""
    return {patch.id: patch for patch in PATCHES}.__getitem__


@pytest.fixture(scope="session")
def finding_of():
    """What a patch's probe finds in this environment."""
    return lambda patch_id: _decisions()[patch_id][1]
