"""Brings what is generated up to date: `verified` in the matrix, the tables in README and docs.

    python tools/tables.py           write
    python tools/tables.py --check   exit status 1 when something is stale

`verified` comes from the files in evidence/, each written by a run whose values were compared;
what a matrix without such a file says of a pair is "unverified".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

import matrix_file
import picture
from speculators_vllm_compat import matrix
from speculators_vllm_compat.patches import PATCHES

REPOSITORY = Path(__file__).resolve().parent.parent
MATRIX = matrix_file.PATH
BEGIN, END = "<!-- generated: {} -->", "<!-- end of generated: {} -->"


def read_evidence() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """`verified` entries by pair, from the evidence files."""
    found = defaultdict(list)
    for path in sorted((REPOSITORY / "evidence").glob("*.json")):
        run = json.loads(path.read_text())
        differences = [case["largest_difference"] for case in run["cases"]]
        worst = max(differences)
        if not worst <= run["tolerance"]:
            raise SystemExit(f"{path.name}: {worst} is beyond its tolerance {run['tolerance']}")
        found[run["speculators"], run["vllm"].split("+")[0]].append(
            {
                "date": run["date"],
                "device": run["device"],
                "largest_difference": worst,
                "cases": len(differences),
                "evidence": f"evidence/{path.name}",
            }
        )
    return found


def with_verified() -> str:
    """The matrix with `verified` as the evidence has it."""
    head, data = matrix_file.read()
    evidence = read_evidence()
    for cell in data["cells"]:
        cell["verified"] = evidence.pop((cell["speculators"], cell["vllm"]), [])
    if evidence:
        raise SystemExit(f"evidence of pairs the matrix has no cell for: {sorted(evidence)}")
    return matrix_file.render(head, data)


def support_table(parsed: matrix.Matrix) -> str:
    """vLLM releases as rows, speculators releases as columns."""
    columns = sorted({cell.speculators for cell in parsed.cells})
    heads = [f"speculators {c}" for c in columns]
    lines = [
        "| vLLM | " + " | ".join(heads) + " | torch | transformers | Python |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for release in parsed.releases:
        words = [_word(parsed.find(column, release.version)) for column in columns]
        lines.append(
            f"| {release.version} | {' | '.join(words)} | {release.torch} | "
            f"`{release.transformers}` | `{release.python}` |"
        )
    return "\n".join(lines)


def summary(parsed: matrix.Matrix) -> str:
    """How many pairs there are, and how many of them were verified on what."""
    kinds = [picture.kind(cell) for cell in parsed.cells]
    gpu = sum(kind in {"gpu", "both"} for kind in kinds)
    cpu = sum(kind in {"cpu", "both"} for kind in kinds)
    return (
        f"{len(kinds)} pairs: {len(parsed.releases)} releases of vLLM, "
        f"{parsed.releases[0].version} to {parsed.releases[-1].version}, with "
        f"{len({cell.speculators for cell in parsed.cells})} of speculators. Values were compared "
        f"on the CPU for {cpu} of them and on a GPU for {gpu}; {kinds.count('none')} are covered "
        "by probes only."
    )


def _word(cell: matrix.Cell | None) -> str:
    if cell is None:
        return "unlisted"
    if not cell.verified:
        return f"{len(cell.patches)} patches, unverified"
    devices = ", ".join(dict.fromkeys(v.device.replace("NVIDIA ", "") for v in cell.verified))
    return f"{len(cell.patches)} patches, verified ({devices})"


def evidence_table(parsed: matrix.Matrix) -> str:
    """Every run with compared values."""
    lines = [
        "| speculators | vLLM | device | date | cases | largest difference | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in parsed.cells:
        for run in cell.verified:
            link = f"[{run.evidence}](../{run.evidence})"
            lines.append(
                f"| {cell.speculators} | {cell.vllm.version} | {run.device} | {run.date} | "
                f"{run.cases} | {run.largest_difference:.1e} | {link} |"
            )
    return "\n".join(lines)


def patch_table(parsed: matrix.Matrix) -> str:
    """Every patch, and the releases of vLLM that need it with each release of speculators."""
    columns = sorted({cell.speculators for cell in parsed.cells})
    lines = [
        "| boundary | what its patch does | " + " | ".join(f"with {c}" for c in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for patch in PATCHES:
        if patch.depends_on == "environment":
            marks = ["by environment"] * len(columns)
        else:
            marks = [_ranges(parsed, patch.id, column) for column in columns]
        lines.append(f"| `{patch.id}` | {patch.summary} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _ranges(parsed: matrix.Matrix, patch_id: str, speculators: Version) -> str:
    """The releases of vLLM that need a patch, as ranges."""
    needed = [
        (cell := parsed.find(speculators, release.version)) is not None and patch_id in cell.patches
        for release in parsed.releases
    ]
    if all(needed):
        return "all"
    names = [str(release.version) for release in parsed.releases]
    runs = [list(run) for _, run in groupby(range(len(names)), key=needed.__getitem__)]
    spans = [(names[run[0]], names[run[-1]]) for run in runs if needed[run[0]]]
    return ", ".join(a if a == b else f"{a} to {b}" for a, b in spans) or "-"


def catalogue() -> str:
    """Every patch, with why it is there and when it can go."""
    parts = []
    for patch in PATCHES:
        how = (
            f"carried out by `{patch.part_of}`" if patch.part_of else f"applied to `{patch.target}`"
        )
        parts.append(
            f"### {patch.id}\n\n{patch.summary}\n\n- Why: {patch.why}\n- Upstream: "
            f"{patch.upstream}\n- Process: {patch.process}; {how}\n- Can go: {patch.removable}"
        )
    return "\n\n".join(parts)


def generated() -> Iterator[tuple[Path, str]]:
    """Every generated file and its text as it should be."""
    text = with_verified()
    yield MATRIX, text
    parsed = matrix.parse(text, str(MATRIX), {patch.id for patch in PATCHES})
    yield REPOSITORY / "docs" / "matrix.svg", picture.svg(parsed)
    sections = {
        "README.md": {"summary": summary(parsed), "support": support_table(parsed)},
        "docs/compatibility.md": {
            "summary": summary(parsed),
            "support": support_table(parsed),
            "evidence": evidence_table(parsed),
            "patches": patch_table(parsed),
        },
        "docs/patches.md": {"catalogue": catalogue()},
    }
    for name, tables in sections.items():
        path = REPOSITORY / name
        content = path.read_text()
        for section, table in tables.items():
            begin, end = BEGIN.format(section), END.format(section)
            before, found, rest = content.partition(begin)
            _, closed, after = rest.partition(end)
            if not found or not closed:
                raise SystemExit(f"{name} has no lines {begin} and {end}")
            content = f"{before}{begin}\n\n{table}\n\n{end}{after}"
        yield path, content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, tell what is stale")
    arguments = parser.parse_args()
    stale = [
        (path, text) for path, text in generated() if not path.is_file() or path.read_text() != text
    ]
    for path, text in stale:
        print(f"{'stale' if arguments.check else 'written'}: {path.relative_to(REPOSITORY)}")
        if not arguments.check:
            path.write_text(text)
    if arguments.check and stale:
        print("run: python dev.py tables")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
