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
from pathlib import Path
from typing import Any

import yaml

from speculators_vllm_compat import matrix
from speculators_vllm_compat.patches import PATCHES

REPOSITORY = Path(__file__).resolve().parent.parent
MATRIX = REPOSITORY / "compat_matrix.yaml"
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


def with_verified(text: str) -> str:
    """The matrix with `verified` as the evidence has it; everything above `cells:` is kept."""
    head, _, _ = text.partition("\ncells:")
    evidence = read_evidence()
    lines = ["cells:"]
    for cell in yaml.safe_load(text)["cells"]:
        lines += [f'  - speculators: "{cell["speculators"]}"', f'    vllm: "{cell["vllm"]}"']
        lines += ["    patches:", *(f"      - {patch}" for patch in cell["patches"])]
        entries = evidence.get((cell["speculators"], cell["vllm"]), [])
        lines.append("    verified:" if entries else "    verified: []")
        for entry in entries:
            lines += [
                f'      - date: "{entry["date"]}"',
                f'        device: "{entry["device"]}"',
                f"        largest_difference: {entry['largest_difference']:.1e}",
                f"        cases: {entry['cases']}",
                f'        evidence: "{entry["evidence"]}"',
            ]
    return head + "\n" + "\n".join(lines) + "\n"


def support_table(parsed: matrix.Matrix) -> str:
    """vLLM releases as rows, speculators releases as columns."""
    columns = sorted({cell.speculators for cell in parsed.cells})
    lines = [
        "| vLLM | " + " | ".join(f"speculators {c}" for c in columns) + " | torch | transformers |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for release in parsed.releases:
        words = [_word(parsed.find(column, release.version)) for column in columns]
        lines.append(
            f"| {release.version} | {' | '.join(words)} | {release.torch} | "
            f"`{release.transformers}` |"
        )
    return "\n".join(lines)


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
    """Every patch, and the pairs that need it."""
    heads = [f"{c.speculators} on {c.vllm.version}" for c in parsed.cells]
    lines = [
        "| boundary | what its patch does | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for patch in PATCHES:
        if patch.depends_on == "environment":
            marks = ["by environment"] * len(heads)
        else:
            marks = ["yes" if patch.id in cell.patches else "-" for cell in parsed.cells]
        lines.append(f"| `{patch.id}` | {patch.summary} | {' | '.join(marks)} |")
    return "\n".join(lines)


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
    text = with_verified(MATRIX.read_text())
    yield MATRIX, text
    parsed = matrix.parse(text, str(MATRIX), {patch.id for patch in PATCHES})
    sections = {
        "README.md": {"support": support_table(parsed)},
        "docs/compatibility.md": {
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
    stale = [(path, text) for path, text in generated() if path.read_text() != text]
    for path, text in stale:
        print(f"{'stale' if arguments.check else 'written'}: {path.relative_to(REPOSITORY)}")
        if not arguments.check:
            path.write_text(text)
    if arguments.check and stale:
        print("run: python dev.py matrix")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
