"""Tables and colours for a terminal; `NO_COLOR` and terminals without colours are respected."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ("coloured", "columns", "in_colour")

_COLUMN_GAP: Final = "  "

_COLOURS_OF_WORDS: Final = {
    **dict.fromkeys(("good", "complete", "default", "available", "ok", "running", "finished", "yes"), "32"),
    **dict.fromkeys(("warning", "incomplete", "unknown", "?", "no"), "33"),
    **dict.fromkeys(("damaged", "cannot", "unusable", "error", "broken", "failed"), "31"),
}
"""Codes of green, yellow and red by the first word of a status."""


def coloured(text: str) -> str:
    """A status in its colour if the terminal supports colours; otherwise the plain text."""
    words = text.replace(":", " ").split()
    return _in_code(text, _COLOURS_OF_WORDS.get(words[0], "") if words else "")


def in_colour(text: str, colour: str) -> str:
    """A text in a colour such as "#4269d0" if the terminal supports colours."""
    parts = (str(int(colour[start : start + 2], 16)) for start in (1, 3, 5))
    return _in_code(text, f"38;2;{';'.join(parts)}")


def _in_code(text: str, code: str) -> str:
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if code and text and wanted else text


def columns(head: Sequence[str], rows: Sequence[Sequence[object]], status: str = "") -> list[str]:
    """Lines of a table with a heading; cells are never cut.

    Characters that control a terminal are escaped: cells may come from other users' files. The column with the heading
    `status` has colours if the terminal supports them.

    Example:
        >>> columns(["name", "value"], [["cpu", True], ["port", 29500]])
        ['name  value', 'cpu   True', 'port  29500']
    """
    from accel_state.untrusted import printable

    texts = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for number, row in enumerate(texts):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        cells[-1] = cells[-1].rstrip()
        if number and status:
            place = list(head).index(status)
            cells[place] = coloured(cells[place])
        lines.append(_COLUMN_GAP.join(cells).rstrip())
    return lines
