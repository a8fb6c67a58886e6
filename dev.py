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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

# The package is at hand for the matrix; what is run here switches the patches on by itself.
os.environ["SPECULATORS_VLLM_COMPAT"] = "off"

REPOSITORY = Path(__file__).resolve().parent
sys.path.insert(0, str(REPOSITORY / "tools"))

import environments  # noqa: E402 - tools/ is not a package

TOOLS = ["mypy==1.19.*", "ruff==0.14.*", "pytest", "types-PyYAML", "build", "hatchling"]
FOLDERS = ["tests/boundaries", "tests/process", "tests/values"]
# Two ranks are left to the everyday pairs: on two cores, older builds' threads take minutes.
VALUES = ["tests/values/test_values.py", "-k", "not real_mla and not two_ranks"]
# 0.4.0 has the generator and worker files of 0.4.0.1, to the byte.
SMALL = {"0.4.0": [VALUES[0], "-k", "mixed_lengths or budget_splits"]}
# Everything on one pair of each release; of the crossed pairs, that workers and values are right.
EVERYDAY = {
    "0.4.0.1/0.29.0": FOLDERS,
    "0.3.0/0.16.0": [
        *FOLDERS,
        # Long, and about this package more than about the pair.
        "--ignore=tests/boundaries/test_drift.py",
        "--ignore=tests/values/test_rehearse.py",
    ],
}
CROSSED = ["0.3.0/0.29.0", "0.4.0.1/0.16.0"]
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
        command = [python, str(script), *rest]
        chosen = {**os.environ, **variables, "SPECULATORS_VLLM_COMPAT": "on"}
        return subprocess.run(command, env=chosen, check=False).returncode


def test(cells: Sequence[str], rest: Sequence[str]) -> int:
    counts, broken = Counts(), []
    if cells:
        return closing(counts, run_jobs([cell_job(c, [*FOLDERS, *rest], counts) for c in cells]))
    for name, command in checks().items():
        print(f"== {name}", flush=True)
        if subprocess.run(command, cwd=REPOSITORY, check=False).returncode:
            broken.append(name)
    jobs = [cell_job(cell, [*chosen, *rest], counts) for cell, chosen in EVERYDAY.items()]
    crossed, few = ["tests/process", *VALUES, *rest], {"VALUES_MODELS": "llama"}
    jobs += [cell_job(cell, crossed, counts, few) for cell in CROSSED]
    return closing(counts, broken + run_jobs([*jobs, *unit_jobs(rest, counts)]))


def unit_jobs(rest: Sequence[str], counts: Counts) -> list[Job]:
    """The tests that need no vLLM, with the newest and the oldest of what the package requires."""
    unit = ["tests/unit", *rest]
    # The packaging tests build the wheel, which has nothing to do with requirements.
    old = [*unit, "--ignore=tests/unit/test_packaging.py"]
    python = str(environments.plain("oldest", ["pytest", *oldest_requirements()]))
    return [
        Job("tests/unit", lambda name, _: pytest([sys.executable], {}, unit, counts, name)),
        Job(
            "tests/unit, oldest requirements",
            lambda name, _: pytest([python], {}, old, counts, name),
        ),
    ]


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
    counts, jobs = Counts(), []
    for cell in cells or [*EVERYDAY, *CROSSED]:
        target = REPOSITORY / "evidence" / f"{cell.replace('/', '-')}-cpu.json"
        chosen = SMALL.get(cell.partition("/")[0], VALUES)
        jobs.append(cell_job(cell, [*chosen, *rest], counts, {"VALUES_EVIDENCE": str(target)}))
    # These runs are about the pairs, more than about models.
    os.environ.setdefault("VALUES_MODELS", "llama")
    broken = run_jobs(jobs)
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


@dataclass(frozen=True)
class Job:
    """One run of pytest; called with its name and the core it is bound to, gives its status."""

    name: str
    run: Callable[[str, int], int]


def run_jobs(jobs: Sequence[Job]) -> list[str]:
    """Run them, two at a time; returns the names of those that failed."""
    # Each is bound to a core of its own: a worker of vLLM that waits for its next call keeps its
    # core busy.
    cores: SimpleQueue[int] = SimpleQueue()
    for core in range(2):
        cores.put(core % (os.cpu_count() or 1))

    def run(job: Job) -> int:
        core = cores.get()
        try:
            return job.run(job.name, core)
        except subprocess.CalledProcessError as error:
            print(f"== {job.name}: its environment could not be built: {error}", flush=True)
            return 1
        finally:
            cores.put(core)

    with ThreadPoolExecutor(max_workers=2) as pool:
        failed = list(pool.map(run, jobs))
    return [job.name for job, status in zip(jobs, failed, strict=True) if status]


def cell_job(
    cell: str, arguments: Sequence[str], counts: Counts, variables: Mapping[str, str] | None = None
) -> Job:
    """A run of pytest in a pair's environment.

    Args:
        cell: The pair.
        arguments: For pytest.
        counts: What the run closes with is added to it.
        variables: More environment variables.
    """

    def run(name: str, core: int) -> int:
        with environment(cell) as (python, own):
            bound = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
            return pytest([python], {**own, **bound, **(variables or {})}, arguments, counts, name)

    return Job(cell, run)


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
        yield str(python), {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


def pytest(
    python: Sequence[str],
    variables: Mapping[str, str],
    arguments: Sequence[str],
    counts: Counts,
    name: str,
) -> int:
    """Run pytest in a process group of its own, so that no worker of vLLM outlives it."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **variables, "SPECULATORS_VLLM_COMPAT": "off"},
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
