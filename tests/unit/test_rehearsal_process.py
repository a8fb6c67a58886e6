"""What the rehearsal's process tells is heard, and nothing of it is left behind."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest

from speculators_vllm_compat.rehearsal import process


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a script in place of the rehearsal's stage; it gets ORDER and PIPE as that does."""
    started = []

    def begin(code: str) -> process.Rehearsal:
        script = tmp_path / "stage.py"
        script.write_text(
            "import json, os, subprocess, sys, time, signal\n"
            "pipe = os.fdopen(int(sys.argv[2]), 'w', buffering=1)\n" + textwrap.dedent(code)
        )
        monkeypatch.setattr(process, "_COMMAND", (sys.executable, str(script)))
        started.append(process.Rehearsal(tmp_path / "order.json", tmp_path / "log"))
        return started[-1]

    yield begin
    for rehearsal in started:
        rehearsal.end()


def alive(pid: int) -> bool:
    return process._session(pid) is not None


def first(rehearsal: process.Rehearsal) -> dict:
    return next(event for event in rehearsal.events() if event)


def test_events_output_and_status(start, tmp_path):
    rehearsal = start(
        """
        print("to the log")
        for number in range(3000):
            pipe.write(json.dumps({"number": number, "text": "x" * 50}) + "\\n")
        sys.exit(3)
        """
    )
    told = [event["number"] for event in rehearsal.events() if event]
    assert told == list(range(3000))
    assert rehearsal.status == 3
    assert (tmp_path / "log").read_text() == "to the log\n"


def test_memory_of_all_its_processes(start):
    rehearsal = start(
        """
        block = b"x" * 200_000_000
        child = subprocess.Popen([sys.executable, "-c", "b = b'x' * 200_000_000; input()"],
                                 stdin=subprocess.PIPE)
        time.sleep(1.5)
        child.communicate()
        """
    )
    for _ in rehearsal.events():
        pass
    assert 400e6 < rehearsal.peak_memory < 600e6


@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_is_left(start, monkeypatch, stubborn):
    monkeypatch.setattr(process, "_PATIENCE", 1.0)
    rehearsal = start(
        f"""
        ignore = {stubborn}
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code])
        if ignore:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pipe.write(json.dumps({{"pids": [os.getpid(), child.pid]}}) + "\\n")
        time.sleep(60)
        """
    )
    pids = first(rehearsal)["pids"]
    assert all(alive(pid) for pid in pids)
    rehearsal.end()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_child_that_outlives_the_process_and_holds_the_pipe(start):
    rehearsal = start(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                                 pass_fds=[pipe.fileno()])
        pipe.write(json.dumps({"pid": child.pid}) + "\\n")
        """
    )
    told = [event for event in rehearsal.events() if event]  # ends although the pipe is open
    rehearsal.end()
    assert not alive(told[0]["pid"])


def test_memory_of_a_process_that_is_gone():
    assert process._memory(2**22 + 1) == 0
    assert process._session(2**22 + 1) is None
    assert Path("/proc/self").exists()
