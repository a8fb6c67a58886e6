"""The matrix as an SVG: a square for each pair, by what it was verified on."""

from __future__ import annotations

from html import escape

from speculators_vllm_compat import matrix

_CELL, _LEFT, _TOP, _GAP = 24, 132, 62, 3
_LEGEND = [
    ("gpu", "values compared on a GPU"),
    ("both", "on a GPU and on the CPU"),
    ("cpu", "on the CPU"),
    ("none", "probes only"),
]
_STYLE = """
    text { font: 11px system-ui, sans-serif; fill: #1f2328 }
    .count { fill: #ffffff; font-size: 10px; text-anchor: middle }
    .gpu { fill: #0a6cbb } .both { fill: #14532d } .cpu { fill: #2f8f4e } .none { fill: #b7791f }
    @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .both { fill: #1f7a45 } }
"""


def kind(cell: matrix.Cell) -> str:
    """What a pair's values were compared on."""
    devices = {run.device for run in cell.verified}
    if not devices:
        return "none"
    if devices == {"cpu"}:
        return "cpu"
    return "both" if "cpu" in devices else "gpu"


def svg(parsed: matrix.Matrix) -> str:
    """The picture; releases of vLLM from left to right, of speculators from top to bottom."""
    rows = sorted({cell.speculators for cell in parsed.cells})
    columns = [release.version for release in parsed.releases]
    width = _LEFT + _CELL * len(columns) + 30
    height = _TOP + _CELL * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        "<title>speculators and vLLM: the number of patches, and what values were compared on"
        "</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="8" y="{_TOP - 8}">speculators on vLLM</text>',
    ]
    for index, version in enumerate(columns):
        x = _LEFT + _CELL * index + _CELL / 2 + 3
        parts.append(
            f'<text transform="translate({x:g},{_TOP - 6}) rotate(-60)">{escape(str(version))}'
            "</text>"
        )
    for line, speculators in enumerate(rows):
        y = _TOP + _CELL * line
        parts.append(f'<text x="8" y="{y + 16}">{escape(str(speculators))}</text>')
        for index, version in enumerate(columns):
            cell = parsed.find(speculators, version)
            if cell is not None:
                parts += _square(_LEFT + _CELL * index, y, cell)
    parts += _legend(height - 22)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _square(x: int, y: int, cell: matrix.Cell) -> list[str]:
    side = _CELL - _GAP
    name = kind(cell)
    words = dict(_LEGEND)[name]
    return [
        f'<g><rect class="{name}" x="{x}" y="{y}" width="{side}" height="{side}" rx="4"/>'
        f'<text class="count" x="{x + side / 2:g}" y="{y + 14}">{len(cell.patches)}</text>'
        f"<title>speculators {cell.speculators} on vLLM {cell.vllm.version}: "
        f"{len(cell.patches)} patches; {words}</title></g>"
    ]


def _legend(y: int) -> list[str]:
    parts, x = [], _LEFT
    for name, words in _LEGEND:
        parts.append(f'<rect class="{name}" x="{x}" y="{y}" width="12" height="12" rx="3"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{words}</text>')
        x += 40 + 6 * len(words)
    return parts
