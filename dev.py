"""Everything a developer runs, on a machine with Python, pip and git.

python dev.py demo      extract hidden states with and without the patches
python dev.py test      lint, types, and every test in every everyday environment
python dev.py test 0.3.0/0.29.0 -k request     one pair, with arguments for pytest
python dev.py matrix    bring compat_matrix.yaml and the tables up to date with evidence/
python dev.py evidence  run the value tests and write evidence/
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

REPOSITORY = Path(__file__).resolve().parent
sys.path.insert(0, str(REPOSITORY / "tools"))

import environments  # noqa: E402 - tools/ is not a package

TOOLS = ["mypy==1.19.*", "ruff==0.14.*", "pytest", "types-PyYAML", "build", "hatchling"]
EVERYDAY = ["0.3.0/0.16.0", "0.4.0.1/0.16.0", "0.3.0/0.29.0", "0.4.0.1/0.29.0"]
TIME_LIMIT = 1500  # seconds, for one run of pytest; a hung worker must not hang CI


@dataclass
class Counts:
    """What the runs of pytest closed with."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, output: str) -> None:
        closing = output.strip().splitlines()[-1] if output.strip() else ""
        for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", closing):
            name = "failed" if word.startswith("error") else word
            setattr(self, name, getattr(self, name) + int(number))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["demo", "test", "matrix", "evidence"])
    parser.add_argument("cells", nargs="*", help="SPECULATORS/VLLM; the everyday ones by default")
    known, rest = parser.parse_known_args()
    python = environments.plain("tools", TOOLS)
    if Path(sys.prefix).resolve() != python.parent.parent.resolve():
        # From here on the package and its requirements are at hand.
        return subprocess.run([str(python), __file__, *sys.argv[1:]], check=False).returncode
    action = {"demo": demo, "test": test, "matrix": matrix, "evidence": evidence}[known.command]
    return action(known.cells, rest)


def demo(cells: Sequence[str], rest: Sequence[str]) -> int:
    cell = cells[0] if cells else "0.3.0/0.29.0"
    python, variables = environment(cell)
    script = REPOSITORY / "examples" / "demo.py"
    return subprocess.run([python, str(script), *rest], env=variables, check=False).returncode


def test(cells: Sequence[str], rest: Sequence[str]) -> int:
    counts, broken = Counts(), []
    if not cells:
        for name, command in checks().items():
            print(f"== {name}", flush=True)
            if subprocess.run(command, cwd=REPOSITORY, check=False).returncode:
                broken.append(name)
        unit = ["tests/unit", *rest]
        if pytest([sys.executable], dict(os.environ), unit, counts, "tests/unit"):
            broken.append("tests/unit")
    folders = ["tests/boundaries", "tests/process", "tests/values"]
    broken += in_cells(cells or EVERYDAY, [*folders, *rest], counts)
    print(f"broken: {', '.join(broken)}" if broken else "all of them passed")
    # A check that is no test counts as one here, so that the closing line tells the whole truth.
    print(
        f"{counts.passed} passed, {max(counts.failed, len(broken))} failed, "
        f"{counts.skipped} skipped",
        flush=True,
    )
    return int(bool(broken))


def checks() -> dict[str, list[str]]:
    """What is checked beside the tests."""
    python = sys.executable
    return {
        "ruff check": [python, "-m", "ruff", "check", "."],
        "ruff format": [python, "-m", "ruff", "format", "--check", "."],
        "mypy": [python, "-m", "mypy"],
        "generated files": [python, "tools/tables.py", "--check"],
    }


def matrix(_cells: Sequence[str], rest: Sequence[str]) -> int:
    command = [sys.executable, str(REPOSITORY / "tools" / "tables.py"), *rest]
    return subprocess.run(command, check=False).returncode


def evidence(cells: Sequence[str], rest: Sequence[str]) -> int:
    return int(bool(in_cells(cells or EVERYDAY, ["tests/values", *rest], Counts(), write=True)))


def in_cells(
    cells: Sequence[str], arguments: Sequence[str], counts: Counts, write: bool = False
) -> list[str]:
    """Run pytest in the environments of pairs; returns those that failed.

    Args:
        cells: The pairs.
        arguments: For pytest.
        counts: What the runs close with is added to it.
        write: Whether runs that pass write their evidence.
    """
    prepared = [(cell, *environment(cell)) for cell in cells]
    if write:
        for cell, _, variables in prepared:
            target = REPOSITORY / "evidence" / f"{cell.replace('/', '-')}-cpu.json"
            variables["VALUES_EVIDENCE"] = str(target)
    # Two at a time, each bound to a core of its own: a worker of vLLM that waits for its next
    # call keeps its core busy.
    cores: SimpleQueue[int] = SimpleQueue()
    for core in range(2):
        cores.put(core % (os.cpu_count() or 1))

    def run(cell: str, python: str, variables: dict[str, str]) -> int:
        core = cores.get()
        try:
            bound = {**variables, "VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
            return pytest([python], bound, arguments, counts, cell)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(max_workers=2) as pool:
        failed = list(pool.map(lambda entry: run(*entry), prepared))
    return [cell for (cell, *_), status in zip(prepared, failed, strict=True) if status]


def environment(cell: str) -> tuple[str, dict[str, str]]:
    """The Python of a pair's environment, and the environment variables that go with it."""
    from speculators_vllm_compat import matrix

    speculators, _, vllm = cell.partition("/")
    release = {str(r.version): r for r in matrix.load().releases}.get(vllm)
    if release is None:
        raise SystemExit(f"{cell!r}: compat_matrix.yaml has no vLLM {vllm!r}; expected A/B")
    python = environments.for_vllm(vllm, release.environment)
    folder = environments.speculators_folder(speculators)
    return str(python), {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


def pytest(
    python: Sequence[str],
    variables: dict[str, str],
    arguments: Sequence[str],
    counts: Counts,
    name: str,
) -> int:
    """Run pytest in a process group of its own, so that no worker of vLLM outlives it."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=REPOSITORY,
            env={**variables, "SPECULATORS_VLLM_COMPAT": "off"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            status = 1
            name += f", stopped after {TIME_LIMIT} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        output = log.read()
    counts.add(output)
    shown = output if status else "\n".join(output.strip().splitlines()[-30:])
    print(f"== {name}\n{shown[-60_000:]}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
