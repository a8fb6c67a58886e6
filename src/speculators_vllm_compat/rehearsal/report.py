"""What a rehearsal prints: progress while it runs, then a short table."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import time
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PATIENCE = 2.0  # seconds before a stage is told about
# vLLM logs a worker's traceback line by line: "(Worker pid=7) ERROR ... [file:1] ValueError: ..."
_WORKER_LOG = re.compile(r"\(Worker[^)]*\) ERROR [^\]]*\] ?(.*)")
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b")
_STYLES = {"good": "32", "bad": "31;1", "faint": "2"}


def coloured(stream: IO[str]) -> bool:
    """Whether to colour what goes to a stream: a terminal, and NO_COLOR does not forbid it."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


class Progress:
    """One line that says what is going on: redrawn on a terminal, once a stage in a log."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._redraw = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._begun = time.monotonic()
        self._stage = ""
        self._since = self._begun
        self._told = ""
        self._drawn = ""  # what stands on the terminal's line

    @property
    def stage(self) -> str:
        return self._stage

    def enter(self, stage: str) -> None:
        self._stage, self._since = stage, time.monotonic()

    def tick(self) -> None:
        """Called several times a second; says what is going on, if it has taken a while."""
        now = time.monotonic()
        if not self._stage or now - self._since < _PATIENCE:
            return
        if self._redraw:
            text = f"{self._stage} ... {now - self._begun:.0f} s"
            if text != self._drawn:
                self._stream.write(f"\r\033[K{text}")
                self._stream.flush()
                self._drawn = text
        elif self._told != self._stage:
            self._told = self._stage
            self._stream.write(f"{self._stage} ...\n")
            self._stream.flush()

    def clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\033[K")
            self._stream.flush()
            self._drawn = ""


class Report:
    """Prints to a stream, in colour where that is wanted."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._coloured = coloured(stream)
        self._width = max(60, min(shutil.get_terminal_size((80, 24)).columns, 100))

    def style(self, text: str, style: str) -> str:
        return f"\033[{_STYLES[style]}m{text}\033[0m" if self._coloured else text

    def line(self, text: str = "") -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def field(self, name: str, text: str) -> None:
        """A name and a text that may go over several lines."""
        self._wrapped(f"{name:<12}", " " * 12, text)

    def paragraph(self, text: str) -> None:
        self._wrapped("", "", text)

    def items(self, title: str, texts: Iterable[str]) -> None:
        listed = list(texts)
        if listed:
            self.line(title)
        for text in listed:
            self._wrapped("  - ", "    ", text)

    def _wrapped(self, first: str, others: str, text: str) -> None:
        for line in textwrap.wrap(
            text,
            self._width,
            initial_indent=first,
            subsequent_indent=others,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [first.rstrip()]:
            self.line(line)

    def heading(self) -> None:
        self.line(self.style(f"{'check':<30}{'result':<9}largest difference", "faint"))

    def outcome(self, outcome: dict[str, Any]) -> None:
        """A row of the table, and below it a note of what did not pass."""
        passed, difference = outcome["passed"], outcome["difference"]
        word, style = {True: ("ok", "good"), False: ("FAILED", "bad"), None: ("-", "faint")}[passed]
        text = "" if difference is None else ("0" if difference == 0 else f"{difference:.1e}")
        note = outcome["note"]
        if passed and not text:
            text, note = note, ""
        self.line(f"{outcome['name']:<30}{self.style(f'{word:<9}', style)}{text}".rstrip())
        if note:
            self._wrapped("    ", "    ", note)


def plan_lines(plan: dict[str, Any]) -> dict[str, str]:
    """What the miniature is, by field."""
    kinds = [f"{few} of {number} {name}".rstrip() for name, (few, number) in plan["kinds"].items()]
    layers = ", ".join(f"{layer} -> {place}" for layer, place in plan["layers"])
    reference = "transformers in float32" if plan["reference"] else "the model itself"
    more = [f"{plan['ranks']} rank" + ("s" if plan["ranks"] > 1 else ""), plan["dtype"]]
    more += [word for word in (plan["quantization"], plan["latent_backend"]) if word]
    return {
        "model": plan["architecture"],
        "miniature": "; ".join(plan["changes"]) or "the model as it is",
        "its layers": "; ".join(kinds),
        "asked for": f"{layers}  (layer of the model -> of the miniature)",
        "run": ", ".join([*more, f"compared with {reference}"]),
    }


def proved(plan: dict[str, Any], outcomes: Sequence[dict[str, Any]], start: str) -> list[str]:
    """What the passed checks prove, in sentences."""
    passed = {outcome["name"] for outcome in outcomes if outcome["passed"]}
    found = [
        f"the generator starts here with {plan['ranks']} worker"
        f"{'s' if plan['ranks'] > 1 else ''} ({start}), loads the form "
        f"{plan['architecture']}, and returns each prompt's rows in order"
    ]
    if "values of transformers" in passed:
        found.append("the states are transformers' of the same weights, layer by layer")
    if "split prompts as whole" in passed:
        found.append("neither the batch, its order nor the token budget changes a state")
    if plan["quantization"]:
        found.append(f"the kernels of {plan['quantization']} run on weights made inside vLLM")
    return found


def worker_error(lines: Iterable[str]) -> tuple[str, list[str]]:
    """The last error a worker logged, as "TypeError: ...", and the traceback that ends with it.

    Both are empty when there is none.
    """
    logged = [match.group(1) for line in lines if (match := _WORKER_LOG.match(line))]
    ends = [index for index, line in enumerate(logged) if _ERROR.match(line)]
    if not ends:
        return "", []
    return logged[ends[-1]], logged[: ends[-1] + 1]


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
