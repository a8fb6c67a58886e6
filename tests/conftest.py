"""Shared by all tests; the ones that need a vLLM build run in one of its environments."""

from __future__ import annotations

import atexit
import importlib.util
import os
from pathlib import Path

import pytest

# Tests switch the patches on and off themselves.
os.environ.setdefault("SPECULATORS_VLLM_COMPAT", "off")

# Where vLLM looks for a free port to rendezvous at. Left to itself it takes one from the system's
# ephemeral range and lets go of it, and now and then somebody else has it by the time it listens.
os.environ.setdefault("VLLM_PORT", str(20000 + os.getpid() % 400 * 100))


def _drop_segments() -> None:
    """The CPU build's shared memory is named after the port, and outlives a worker that is killed.

    The next engine at that port would meet it.
    """
    first = int(os.environ["VLLM_PORT"])
    for segment in Path("/dev/shm").glob("*-cpushm_*"):
        port = segment.name.partition("-")[0]
        if port.isdigit() and first <= int(port) < first + 100:
            segment.unlink(missing_ok=True)


_drop_segments()
atexit.register(_drop_segments)

_NEEDS_VLLM = ("boundaries", "values", "process")


def pytest_ignore_collect(collection_path) -> bool | None:
    """Leave out, in an environment without vLLM, what cannot even be imported there."""
    if importlib.util.find_spec("vllm") is None and collection_path.name in _NEEDS_VLLM:
        return True
    return None


@pytest.fixture(scope="session")
def worker_start_method() -> str:
    """Fork keeps an engine's start under two seconds; tests/process covers spawn."""
    return "fork"
