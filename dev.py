"""Everything a developer runs, on a machine with Python, pip and git.

python dev.py demo                       hidden states with and without the patches
python dev.py test                       lint, types, and every test in everyday environments
python dev.py test 0.3.0/0.29.0 -k rpc   one pair, with arguments for pytest
python dev.py matrix 0.3.0/0.16.0        values of a pair on the CPU, written to evidence/
python dev.py matrix all                 of every pair; "missing": of those without evidence
python dev.py tables                     what is generated, from evidence/ and snapshots/
python dev.py snapshots [0.34.0]         facts of releases' sources, for the tests
python dev.py news                       probe the newest vLLM; exit status 1: unknown form
python dev.py add-release 0.34.0         a row of the matrix, its cells, its snapshot
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

REPOSITORY = Path(__file__).resolve().parent
sys.path.insert(0, str(REPOSITORY / "tools"))

import environments  # noqa: E402 - tools/ is not a package

TOOLS = ["mypy==1.19.*", "ruff==0.14.*", "pytest", "types-PyYAML", "build", "hatchling"]
EVERYDAY = ["0.3.0/0.16.0", "0.4.0.1/0.16.0", "0.3.0/0.29.0", "0.4.0.1/0.29.0"]
FOLDERS = ["tests/boundaries", "tests/process", "tests/values"]
# Two ranks are left to the everyday pairs: on two cores, older builds' threads take minutes.
VALUES = ["tests/values/test_values.py", "-k", "not real_mla and not two_ranks"]
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
    actions = {
        "demo": demo,
        "test": test,
        "matrix": matrix,
        "tables": tool("tables.py"),
        "snapshots": tool("releases.py", "snapshots"),
        "news": tool("releases.py", "news"),
        "add-release": tool("releases.py", "add"),
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=list(actions))
    parser.add_argument("names", nargs="*", help="pairs, SPECULATORS/VLLM, or releases of vLLM")
    known, rest = parser.parse_known_args()
    python = environments.plain("tools", TOOLS)
    if Path(sys.prefix).resolve() != python.parent.parent.resolve():
        # From here on the package and its requirements are at hand.
        return subprocess.run([str(python), __file__, *sys.argv[1:]], check=False).returncode
    return actions[known.command](known.names, rest)


def demo(cells: Sequence[str], rest: Sequence[str]) -> int:
    script = REPOSITORY / "examples" / "demo.py"
    with environment(cells[0] if cells else "0.3.0/0.29.0") as (python, variables):
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
        oldest = str(environments.plain("oldest", ["pytest", *oldest_requirements()]))
        # The packaging tests build the wheel, which has nothing to do with requirements.
        unit += ["--ignore", "tests/unit/test_packaging.py"]
        if pytest([oldest], dict(os.environ), unit, counts, "tests/unit, oldest requirements"):
            broken.append("tests/unit, oldest requirements")
    broken += in_cells(cells or EVERYDAY, [*FOLDERS, *rest], counts)
    return closing(counts, broken)


def oldest_requirements() -> list[str]:
    """The oldest release allowed of everything the package requires."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    [listed] = re.findall(r"^dependencies = \[(.*)\]", text, re.M)
    return [item.replace(">=", "==") for item in re.findall(r'"([^"]+)"', listed)]


def checks() -> dict[str, list[str]]:
    """What is checked beside the tests."""
    python = sys.executable
    return {
        "ruff check": [python, "-m", "ruff", "check", "."],
        "ruff format": [python, "-m", "ruff", "format", "--check", "."],
        "mypy": [python, "-m", "mypy"],
        "generated files": [python, "tools/tables.py", "--check"],
    }


def matrix(cells: Sequence[str], rest: Sequence[str]) -> int:
    """Value runs of pairs; each that passes writes its evidence, one that fails stops no other."""
    from speculators_vllm_compat import matrix

    listed = {f"{c.speculators}/{c.vllm.version}": c for c in matrix.load().cells}
    if list(cells) in (["all"], ["missing"]):
        done = (lambda c: "cpu" in {v.device for v in c.verified}) if cells == ["missing"] else bool
        cells = [name for name, cell in listed.items() if cells == ["all"] or not done(cell)]
    os.environ.setdefault("VALUES_MODELS", "llama")  # about the pairs, more than about models
    counts = Counts()
    broken = in_cells(cells or EVERYDAY, [*VALUES, *rest], counts, write=True)
    subprocess.run([sys.executable, "tools/tables.py"], cwd=REPOSITORY, check=True)
    return closing(counts, broken)


def closing(counts: Counts, broken: Sequence[str]) -> int:
    print(f"broken: {', '.join(broken)}" if broken else "all of them passed")
    # A check that is no test counts as one here, so that the closing line tells the whole truth.
    print(
        f"{counts.passed} passed, {max(counts.failed, len(broken))} failed, "
        f"{counts.skipped} skipped",
        flush=True,
    )
    return int(bool(broken))


def tool(script: str, *first: str):
    """A command that a script in tools/ carries out."""

    def run(names: Sequence[str], rest: Sequence[str]) -> int:
        command = [sys.executable, str(REPOSITORY / "tools" / script), *first, *names, *rest]
        return subprocess.run(command, check=False).returncode

    return run


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
    # Two at a time, each bound to a core of its own: a worker of vLLM that waits for its next
    # call keeps its core busy.
    cores: SimpleQueue[int] = SimpleQueue()
    for core in range(2):
        cores.put(core % (os.cpu_count() or 1))

    def run(cell: str) -> int:
        core = cores.get()
        try:
            with environment(cell) as (python, variables):
                bound = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
                if write:
                    name = f"{cell.replace('/', '-')}-cpu.json"
                    bound["VALUES_EVIDENCE"] = str(REPOSITORY / "evidence" / name)
                return pytest([python], {**variables, **bound}, arguments, counts, cell)
        except subprocess.CalledProcessError as error:
            print(f"== {cell}: its environment could not be built: {error}", flush=True)
            return 1
        finally:
            cores.put(core)

    with ThreadPoolExecutor(max_workers=2) as pool:
        failed = list(pool.map(run, cells))
    return [cell for cell, status in zip(cells, failed, strict=True) if status]


@contextlib.contextmanager
def environment(cell: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The Python of a pair's environment, and the environment variables that go with it."""
    from speculators_vllm_compat import matrix

    speculators, _, vllm = cell.partition("/")
    release = {str(r.version): r for r in matrix.load().releases}.get(vllm)
    if release is None:
        raise SystemExit(f"{cell!r}: compat_matrix.yaml has no vLLM {vllm!r}; expected A/B")
    folder = environments.speculators_folder(speculators)
    with environments.for_vllm(vllm, release.environment) as python:
        yield str(python), {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


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
