"""Rows of text in columns, for people who read and for programs that cut."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ("columns",)

_GAP = "  "


def columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table with a heading; nothing is wrapped or cut.

    Example:
        >>> columns(["name", "value"], [["cpu", True], ["port", 29500]])
        ['name  value', 'cpu   True', 'port  29500']
    """
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [_GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
