"""Starts the rehearsal's process, listens to it, measures it, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMAND = (sys.executable, "-m", "speculators_vllm_compat.rehearsal.stage")
_PATIENCE = 10.0  # seconds for workers to end by themselves
_TICK = 0.25


class Rehearsal:
    """The process and all that it starts, which share a session of their own.

    Attributes:
        peak_memory: The most memory they have held together, in bytes: each page once, divided
            among the processes that share it.
    """

    def __init__(self, order: Path, log: Path) -> None:
        self.peak_memory = 0
        reading, writing = os.pipe()
        self._events = reading
        self._buffer = b""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*_COMMAND, str(order), str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the process tells, and an empty dict at least four times a second."""
        while True:
            ended = self._process.poll() is not None
            yield from self._read(0 if ended else _TICK)
            self._measure()
            if ended:
                return
            yield {}

    def _read(self, patience: float) -> Iterator[dict[str, Any]]:
        while select.select([self._events], [], [], patience)[0]:
            received = os.read(self._events, 65536)
            *lines, self._buffer = (self._buffer + received).split(b"\n")
            yield from (json.loads(line) for line in lines)
            if not received:
                time.sleep(patience)  # closed: the process is about to end
                return
            patience = 0

    @property
    def status(self) -> int | None:
        """The process's exit status; negative for a signal."""
        return self._process.poll()

    def end(self) -> None:
        """Ask the process to end, wait, and then end whatever is left of its session."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        deadline = time.monotonic() + (2.0 if self._members() else 0.0)
        while time.monotonic() < deadline and self._members():
            time.sleep(0.05)  # Python's resource tracker removes shared memory, then ends
        while members := self._members():
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait()  # it has ended; nobody else would collect it
        if self._events >= 0:
            os.close(self._events)
            self._events = -1

    def _members(self) -> list[int]:
        return [pid for pid in _pids() if _session(pid) == self._process.pid]

    def _measure(self) -> None:
        held = sum(_memory(pid) for pid in self._members())
        self.peak_memory = max(self.peak_memory, held)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _session(pid: int) -> int | None:
    """The session of a process that runs; None for one that is gone or only waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, _parent, _group, session = text.rpartition(")")[2].split()[:4]
    return None if state == "Z" else int(session)


def _memory(pid: int) -> int:
    """The proportional set size of a process, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("Pss:")), "Pss: 0 kB")
    return int(found.split()[1]) * 1024
