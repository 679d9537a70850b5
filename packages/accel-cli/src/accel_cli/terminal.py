"""Tables and colours for a terminal.

In a terminal, tables are drawn with rich if it is installed, otherwise as plain columns. `NO_COLOR` and terminals
without colours are respected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ("coloured", "columns", "in_colour")

_GAP: Final = "  "


_COLOURS: Final = {
    **dict.fromkeys(("good", "complete", "default", "available", "ok", "running", "finished", "yes"), "green"),
    **dict.fromkeys(("warning", "incomplete", "unknown", "?", "no"), "yellow"),
    **dict.fromkeys(("damaged", "cannot", "unusable", "error", "broken", "failed"), "red"),
}
_CODES: Final = {"green": "32", "yellow": "33", "red": "31"}


def coloured(text: str) -> str:
    """A status in its colour if the terminal supports colours; otherwise the plain text."""
    code = _CODES.get(_colour(text))
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if code is not None and wanted else text


def in_colour(text: str, colour: str) -> str:
    """A text in a colour such as "#4269d0", if rich is installed and the terminal supports colours."""
    from accel_state.settings.installed import importable

    if not (text and sys.stdout.isatty() and importable("rich")):
        return text
    from rich.console import Console
    from rich.text import Text

    console = Console()
    with console.capture() as captured:
        console.print(Text(text, style=colour), end="", soft_wrap=True)
    return captured.get()


def _colour(text: str) -> str:
    words = text.replace(":", " ").split()
    return _COLOURS.get(words[0], "") if words else ""


def columns(head: Sequence[str], rows: Sequence[Sequence[object]], status: str = "") -> list[str]:
    """Lines of a table with a heading; cells are never cut, and wrap only at the width of a terminal.

    Characters that control a terminal are escaped: cells may come from other users' files. The column with the heading
    `status` has colours if the terminal supports them.

    Example:
        >>> columns(["name", "value"], [["cpu", True], ["port", 29500]])
        ['name  value', 'cpu   True', 'port  29500']
    """
    from accel_state.settings.installed import importable
    from accel_state.untrusted import printable

    if sys.stdout.isatty() and importable("rich"):
        return _drawn(head, rows, status)
    texts = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [_GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def _drawn(head: Sequence[str], rows: Sequence[Sequence[object]], status: str) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from accel_state.untrusted import printable

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(head):
        drawn.add_column(name, overflow="fold", style="" if number else "cyan", header_style="bold")
    for row in rows:
        texts = [printable(cell) for cell in row]
        styles = [_colour(text) if name == status else "" for name, text in zip(head, texts, strict=True)]
        drawn.add_row(*(Text(text, style=style) for text, style in zip(texts, styles, strict=True)))
    console = Console()
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]
