"""``speculators-vllm-compat rehearse MODEL``: the real generator on a miniature of a model."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rehearsal import files, miniature
from ..rehearsal.process import Rehearsal
from ..rehearsal.report import Progress, Report, gibibytes, plan_lines, proved, worker_error

if TYPE_CHECKING:
    from collections.abc import Iterator

DESCRIPTION = (
    "Make a miniature of a model (the same architecture, few and narrow layers, random weights) "
    "and run the real generator on it, here, before the model itself is loaded. Reads the model's "
    "config and tokenizer files and nothing else; downloads nothing."
)
EXAMPLES = """\
examples:
  speculators-vllm-compat rehearse /models/DeepSeek-V3 --layer-ids 2 30 57 60
  speculators-vllm-compat rehearse meta-llama/Llama-3.1-8B-Instruct \\
      --tensor-parallel-size 2
  speculators-vllm-compat rehearse ./gpt-oss --dtype bfloat16

exit status: 0 everything passed, 1 something did not, 2 wrong usage
"""
OK, FAILED, USAGE = 0, 1, 2
_LOG_LINES = 15
_ENDING = (signal.SIGINT, signal.SIGTERM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = textwrap.fill(DESCRIPTION, 78)
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="a model's folder, or a cached one's id")
    parser.add_argument(
        "--layer-ids",
        type=int,
        nargs="+",
        metavar="N",
        help="layers of the model, as for the generator; its own choice when left out",
    )
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1, metavar="N")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        metavar="DTYPE",
        help="%(choices)s; auto: float32, which compares most closely, and bfloat16 for kernels "
        "that do not take it (latent attention and quantized weights on a GPU)",
    )
    parser.add_argument(
        "--quantization",
        choices=["auto", "keep", "drop"],
        default="auto",
        help="the model's scheme; auto: keep it, but not on a build of vLLM for the CPU",
    )
    parser.add_argument("--max-model-len", type=_positive, default=2048, metavar="TOKENS")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=0.1,
        metavar="SHARE",
        help="as for the generator; a miniature needs little (default 0.1)",
    )
    parser.add_argument(
        "--start-method",
        choices=["fork", "spawn"],
        help="how workers start; left to vLLM and VLLM_WORKER_MULTIPROC_METHOD when left out",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="copy and run the model's own Python files, as the generator always does",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")


def main(arguments: argparse.Namespace) -> int:
    """Rehearse, print the table; 0 when everything passed, 1 when not, 2 for a wrong call."""
    begun = time.monotonic()
    report = Report(sys.stdout)
    try:
        source = files.find(arguments.model)
        config = files.read_config(source)
        miniature.text_path(config)
    except (files.ModelNotFoundError, miniature.UnusableConfigError) as error:
        print(f"rehearse: {error}", file=sys.stderr)
        return USAGE
    problems = _announce(report)
    if problems:
        report.items(report.style("cannot be patched:", "bad"), problems)
        return FAILED
    log = _new_log()
    keep_log = True
    try:
        with _work_folder() as work, _terminated_as_interrupted():
            order = _order(arguments, source, config, work)
            seen = _follow(Rehearsal(order, log), report, Progress(sys.stderr))
        keep_log = seen.exit_status() == FAILED
        return _conclude(seen, report, log, time.monotonic() - begun)
    except KeyboardInterrupt:
        print("rehearse: interrupted; workers ended, miniature removed", file=sys.stderr)
        keep_log = False
        return 130
    finally:
        if not keep_log:
            log.unlink(missing_ok=True)


class _Seen:
    """What the rehearsal's process told."""

    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}
        self.outcomes: list[dict[str, Any]] = []
        self.start = ""
        self.notes: list[str] = []
        self.gpu_memory: int | None = None
        self.peak_memory = 0
        self.error = ""
        self.unusable = ""
        self.stage = ""
        self.done = False
        self.process_status: int | None = None

    def exit_status(self) -> int:
        if self.unusable:
            return USAGE
        passed = self.done and bool(self.outcomes)
        return OK if passed and all(o["passed"] is not False for o in self.outcomes) else FAILED


def _follow(rehearsal: Rehearsal, report: Report, progress: Progress) -> _Seen:
    """Print what the process tells as it comes, until it ends; end all of it in any case."""
    seen = _Seen()
    try:
        for event in rehearsal.events():
            _take(event, seen, report, progress)
            progress.tick()
        seen.process_status = rehearsal.status
    finally:
        progress.clear()
        with _undisturbed():
            rehearsal.end()
    seen.stage, seen.peak_memory = progress.stage, rehearsal.peak_memory
    return seen


def _take(event: dict[str, Any], seen: _Seen, report: Report, progress: Progress) -> None:
    if event:
        progress.clear()
    if "stage" in event:
        progress.enter(event["stage"])
    if "plan" in event:
        seen.plan = event["plan"]
        for name, text in plan_lines(seen.plan).items():
            report.field(name, text)
        report.line()
    if "check" in event:
        if not seen.outcomes:
            report.heading()
        seen.outcomes.append(event["check"])
        report.outcome(event["check"])
    seen.start = event.get("started", seen.start)
    seen.notes = event.get("notes", seen.notes)
    seen.gpu_memory = event.get("gpu_memory", seen.gpu_memory)
    seen.error = event.get("error", seen.error)
    seen.unusable = event.get("unusable", seen.unusable)
    seen.done = event.get("done", seen.done)


def _conclude(seen: _Seen, report: Report, log: Path, seconds: float) -> int:
    status = seen.exit_status()
    if status == USAGE:
        print(f"rehearse: {seen.unusable}", file=sys.stderr)
        return status
    if seen.outcomes:
        report.line()
    if not seen.done:
        _tell_failure(seen, report, log)
    elif status == OK:
        report.items("proved:", proved(seen.plan, seen.outcomes, seen.start))
        report.items("not proved:", _not_proved(seen))
    memory = f"peak memory {gibibytes(seen.peak_memory)} (this process left out)"
    if seen.gpu_memory is not None:
        memory += f", {gibibytes(seen.gpu_memory)} on a GPU"
    report.line()
    word = report.style("passed", "good") if status == OK else report.style("FAILED", "bad")
    report.line(f"{word} in {seconds:.0f} s, {memory}")
    if status == FAILED and seen.done:
        report.line(f"the log of the generator and its workers: {log}")
    return status


def _tell_failure(seen: _Seen, report: Report, log: Path) -> None:
    reason = seen.error or f"the process ended with status {seen.process_status}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    cause, traced = worker_error(lines)
    report.line(report.style(f"failed while {seen.stage}:", "bad"))
    report.paragraph(reason)
    if cause:
        report.paragraph(f"in a worker: {cause}")
    if seen.plan and seen.plan["own_dtype"] not in (None, seen.plan["dtype"]):
        report.paragraph(
            f"It ran in {seen.plan['dtype']}, and not every kernel takes that. The model's own "
            f"dtype is {seen.plan['own_dtype']}: try --dtype {seen.plan['own_dtype']}."
        )
    report.line()
    whose = "the end of the worker's traceback in" if traced else "the last lines of"
    report.paragraph(f"{whose} the log, {log}:")
    telling = traced or [line for line in lines if " INFO " not in line]
    for line in telling[-_LOG_LINES:]:
        report.line(f"  {line}")


def _not_proved(seen: _Seen) -> list[str]:
    skipped = [
        f"{outcome['name']}: {outcome['note']}"
        for outcome in seen.outcomes
        if outcome["passed"] is None
    ]
    standing = ["the checkpoint itself, its loading, and the memory and speed of the real size"]
    return [*skipped, *seen.notes, *standing]


def _announce(report: Report) -> tuple[str, ...]:
    """Say which pair this is; returns why it cannot be patched."""
    import speculators_vllm_compat

    status = speculators_vllm_compat.status()
    on = f"patched, {status.matrix}" if status.active else "patches are switched off"
    report.field("pair", f"{status.speculators}, {status.vllm}: {on}")
    return status.problems if status.active else ()


def _order(arguments: argparse.Namespace, source: Path, config: dict[str, Any], work: Path) -> Path:
    folder = work / "miniature"
    folder.mkdir()
    tokenizer = files.copy(source, config, folder, trust_remote_code=arguments.trust_remote_code)
    order = {
        "folder": str(folder),
        "tokenizer": tokenizer,
        "layer_ids": arguments.layer_ids,
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "start_method": arguments.start_method,
        "trust_remote_code": arguments.trust_remote_code,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "max_model_len": arguments.max_model_len,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "seed": arguments.seed,
    }
    path = work / "order.json"
    path.write_text(json.dumps(order), encoding="utf-8")
    return path


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="speculators-vllm-compat-")
    try:
        yield Path(folder)
    finally:
        with _undisturbed():
            shutil.rmtree(folder, ignore_errors=True)


def _new_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="speculators-vllm-compat-rehearse-", suffix=".log")
    os.close(handle)
    return Path(name)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Clean up when asked to end, as for Ctrl-C."""

    def interrupt(*_signal: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not keep us from cleaning up after the first; it takes seconds."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most 1")
    return number
