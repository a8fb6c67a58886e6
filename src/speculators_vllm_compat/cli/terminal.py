"""Plain text for logs, and the same with colours for a terminal."""

from __future__ import annotations

import os
import shutil
import textwrap
from dataclasses import dataclass
from typing import TextIO

# From the eight basic colours, those that can be read on a dark and on a light background.
_CODES = {"bold": "1", "red": "31", "green": "32", "magenta": "35", "cyan": "36"}


@dataclass(frozen=True)
class Style:
    """How to write to a stream.

    Attributes:
        colours: Whether it takes them.
        width: Its columns.
    """

    colours: bool
    width: int

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Colours on a terminal only, unless ``NO_COLOR`` is set; 80 columns elsewhere."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        columns = shutil.get_terminal_size().columns if stream.isatty() else 80
        return cls(stream.isatty() and not plain, max(40, columns))

    def paint(self, text: str, *how: str) -> str:
        """A text in a colour, or bold."""
        if not self.colours or not how:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in how)}m{text}\x1b[0m"

    def wrapped(self, text: str, first: int, rest: int) -> list[str]:
        """A text in lines that fit, none of its words cut.

        Args:
            text: The text.
            first: How many columns are taken in front of the first line.
            rest: By how many columns the others are indented.
        """
        lines = textwrap.wrap(
            text,
            self.width,
            initial_indent=" " * first,
            subsequent_indent=" " * rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [lines[0][first:], *lines[1:]] if lines else [""]
