"""compat_matrix.yaml as a text that tools write: rows and cells, and the head above them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

PATH = Path(__file__).resolve().parent.parent / "compat_matrix.yaml"
_WIDTH = 100


def read() -> tuple[str, dict[str, Any]]:
    """The comment at the top, and the data."""
    text = PATH.read_text()
    head, _, _ = text.partition("schema:")
    return head, yaml.safe_load(text)


def render(head: str, data: dict[str, Any]) -> str:
    """The file's text: releases, then cells, both in the order of versions."""
    lines = [f"schema: {data['schema']}", "releases:"]
    for release in sorted(data["releases"], key=lambda r: Version(r["version"])):
        lines += _release(release)
    lines.append("cells:")
    for cell in sorted(
        data["cells"], key=lambda c: (Version(c["vllm"]), Version(c["speculators"]))
    ):
        lines += _cell(cell)
    return head + "\n".join(lines) + "\n"


def _release(release: dict[str, Any]) -> list[str]:
    texts = [k for k in release if k != "environment"]
    lines = [f'    {key}: "{release[key]}"' for key in texts]
    lines[0] = "  - " + lines[0].lstrip()
    return [*lines, *_list("environment", [f'"{item}"' for item in release["environment"]])]


def _cell(cell: dict[str, Any]) -> list[str]:
    lines = [f'  - speculators: "{cell["speculators"]}"', f'    vllm: "{cell["vllm"]}"']
    lines += _list("patches", cell["patches"])
    lines.append("    verified:" if cell["verified"] else "    verified: []")
    for run in cell["verified"]:
        lines.append(
            f'      - {{date: "{run["date"]}", device: "{run["device"]}", largest_difference: '
            f"{run['largest_difference']:.1e}, cases: {run['cases']},"
        )
        lines.append(f'         evidence: "{run["evidence"]}"}}')
    return lines


def _list(key: str, items: list[str]) -> list[str]:
    text = f"    {key}: [{', '.join(items)}]"
    # Only at spaces: a requirement such as "huggingface-hub<1" has none.
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )
