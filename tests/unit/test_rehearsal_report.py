"""What a rehearsal prints: 80 columns, colours on a terminal alone, causes and remedies."""

from __future__ import annotations

import argparse
import io

import pytest

import speculators_vllm_compat.rehearsal.report as module
from speculators_vllm_compat.cli import rehearse
from speculators_vllm_compat.rehearsal.report import Progress, Report, coloured, worker_error


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_colours(monkeypatch):
    assert coloured(Terminal())
    assert not coloured(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured(Terminal())


def test_a_log_has_no_escapes_and_fits():
    stream = io.StringIO()
    report = Report(stream)
    report.field("model", "word " * 60)
    report.heading()
    for passed, note, difference in [(True, "", 0.0), (False, "why " * 40, 2.5), (None, "x", None)]:
        outcome = {"name": "n", "passed": passed, "note": note, "difference": difference}
        report.outcome(outcome)
    report.items("not proved:", ["a long sentence " * 20])
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\033" not in stream.getvalue()
    assert any("FAILED" in line and "2.5e+00" in line for line in lines)


def test_a_terminal_has_colours():
    stream = Terminal()
    Report(stream).outcome({"name": "n", "passed": False, "note": "", "difference": None})
    assert "\033[31;1mFAILED" in stream.getvalue()


def test_progress_tells_of_what_takes_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(stream)
    progress.enter("quick")
    now[0] = 1.0
    progress.tick()
    progress.enter("slow")
    for now[0] in (2.0, 4.0, 6.0, 60.0):
        progress.tick()
    progress.clear()
    assert stream.getvalue() == "slow ...\n"  # once in a log


def test_progress_is_redrawn_on_a_terminal(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = Terminal()
    progress = Progress(stream)
    progress.enter("slow")
    for now[0] in (3.0, 3.1, 3.2, 4.0):
        progress.tick()
    progress.clear()
    assert stream.getvalue() == "\r\033[Kslow ... 3 s\r\033[Kslow ... 4 s\r\033[K"


def test_a_workers_error():
    lines = [
        '(Worker pid=7) ERROR 12-01 13:33:56 [multiproc_executor.py:1055]   File "x.py", line 1',
        "(Worker pid=7) ERROR 12-01 13:33:56 [m.py:1055] RuntimeError: expected BFloat16",
        "RuntimeError: Worker failed with error 'expected BFloat16'",
    ]
    error = "RuntimeError: expected BFloat16"
    assert worker_error(lines) == (error, ['  File "x.py", line 1', error])
    assert worker_error(lines[2:]) == ("", [])


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    rehearse.add_arguments(parser)
    return parser.parse_args(words)


def test_arguments():
    arguments = parsed("m", "--layer-ids", "2", "30", "--tensor-parallel-size", "4")
    assert arguments.layer_ids == [2, 30]
    assert arguments.tensor_parallel_size == 4
    assert arguments.dtype == "auto"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--tensor-parallel-size", "0"], "0 is not 1 or more"),
        (["m", "--gpu-memory-utilization", "1.5"], "1.5 is not more than 0 and at most 1"),
        ([], "required: MODEL"),
    ],
)
def test_wrong_arguments(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == rehearse.USAGE
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys):
    assert rehearse.main(parsed("/nowhere")) == rehearse.USAGE
    assert "/nowhere is not a folder; expected" in capsys.readouterr().err


def test_a_config_of_something_else(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    assert rehearse.main(parsed(str(tmp_path))) == rehearse.USAGE
    assert "no num_hidden_layers" in capsys.readouterr().err


def test_the_help_has_examples_and_exit_statuses(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    assert "speculators-vllm-compat rehearse /models/DeepSeek-V3 --layer-ids 2 30 57 60" in text
    assert "exit status" in text
