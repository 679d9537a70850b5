"""Tables: drawn with the library rich in a terminal where it is installed, plain columns for everybody else.

`NO_COLOR` and a terminal that knows no colours are respected by rich.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from accel_state.settings.installed import importable
from accel_state.untrusted import printable

__all__ = ("columns",)

_GAP: Final = "  "


def columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table with a heading; nothing is cut, and only a terminal's width wraps anything.

    Characters that control a terminal are escaped: cells may come from files of others.

    Example:
        >>> columns(["name", "value"], [["cpu", True], ["port", 29500]])
        ['name  value', 'cpu   True', 'port  29500']
    """
    if sys.stdout.isatty() and importable("rich"):
        return _drawn(head, rows)
    texts = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [_GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def _drawn(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(head):
        drawn.add_column(name, overflow="fold", style="" if number else "cyan", header_style="bold")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    console = Console()
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]
