"""Boxes on a grid, joined by vertical arrows, as SVG: no library and no network is needed to draw or to show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import NamedTuple
from xml.sax.saxutils import escape

__all__ = ("Arrow", "Blocked", "Box", "drawn")

_COLUMN = 250
_GAP_X = 24
_GAP_Y = 40
_LINE = 16
_PER_LETTER = 6.3
_MARGIN = 20
_STYLE = """
  .ground { fill: #ffffff }
  .box { fill: #eef3f9; stroke: #3b5675; stroke-width: 1.5 }
  .outside { fill: #fdf6e3; stroke: #8a6d1d; stroke-width: 1.5; stroke-dasharray: 6 4 }
  .arrow { stroke: #3b5675; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  .title { font: bold 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #16222f }
  .said { font: 12px system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif; fill: #2f3e4e }
  .tip { fill: #3b5675 }
"""


class Box(NamedTuple):
    """One box.

    Args:
        title: its name, by which arrows find it.
        said: a sentence below the name.
        row: its row, from 0 at the top.
        first: the first column it covers, from 0 at the left.
        last: the last one.
        outside: whether it stands for something that is not ours.
    """

    title: str
    said: str
    row: int
    first: int
    last: int
    outside: bool = False

    @property
    def left(self) -> int:
        """Its left edge in pixels."""
        return _MARGIN + self.first * (_COLUMN + _GAP_X)

    @property
    def width(self) -> int:
        """Its width in pixels."""
        return (self.last - self.first + 1) * (_COLUMN + _GAP_X) - _GAP_X

    @property
    def lines(self) -> list[str]:
        """The sentence in lines that fit into it."""
        return wrap(self.said, int((self.width - 24) / _PER_LETTER))


class Arrow(NamedTuple):
    """From the box of one title down to that of another."""

    source: str
    target: str


class Blocked(ValueError):
    """Raised when an arrow cannot be drawn: no column is shared, it does not lead down, or a box is in its way."""


def drawn(title: str, about: str, boxes: Sequence[Box], arrows: Sequence[Arrow]) -> str:
    """The picture.

    Args:
        title: its name, for readers who do not see it.
        about: what it shows, for the same.

    Raises:
        Blocked: an arrow cannot be drawn.
    """
    tops, height = _rows(boxes)
    width = max(box.left + box.width for box in boxes) + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(about)}</desc>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">',
        '<path class="tip" d="M0 0 L10 5 L0 10 z"/></marker></defs>',
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *(line for box in boxes for line in _box(box, tops[box.row], _height(boxes, box.row))),
        *(_arrow(arrow, boxes, tops) for arrow in arrows),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _rows(boxes: Sequence[Box]) -> tuple[list[int], int]:
    """The upper edge of each row, and the height of the picture."""
    tops, place = [], _MARGIN
    for row in range(max(box.row for box in boxes) + 1):
        tops.append(place)
        place += _height(boxes, row) + _GAP_Y
    return tops, place - _GAP_Y + _MARGIN


def _height(boxes: Sequence[Box], row: int) -> int:
    return 34 + _LINE * max((len(box.lines) for box in boxes if box.row == row), default=0)


def _box(box: Box, top: int, height: int) -> Iterator[str]:
    kind = "outside" if box.outside else "box"
    middle = box.left + box.width // 2
    yield f'<rect class="{kind}" x="{box.left}" y="{top}" width="{box.width}" height="{height}" rx="6"/>'
    yield f'<text class="title" x="{middle}" y="{top + 22}" text-anchor="middle">{escape(box.title)}</text>'
    for number, line in enumerate(box.lines):
        place = top + 22 + _LINE * (number + 1)
        yield f'<text class="said" x="{middle}" y="{place}" text-anchor="middle">{escape(line)}</text>'


def _arrow(arrow: Arrow, boxes: Sequence[Box], tops: Sequence[int]) -> str:
    """A vertical line through the middle of the columns that two boxes share and no box between them covers."""
    by_title = {box.title: box for box in boxes}
    source, target = by_title[arrow.source], by_title[arrow.target]
    between = [box for box in boxes if source.row < box.row < target.row]
    free = [
        column
        for column in range(max(source.first, target.first), min(source.last, target.last) + 1)
        if not any(box.first <= column <= box.last for box in between)
    ]
    if not free or source.row >= target.row:
        raise Blocked(f"no way for an arrow from {source.title} down to {target.title}")
    run = [column for column in range(free[0], free[-1] + 1) if column in free]
    x = _MARGIN + (run[0] + run[-1]) * (_COLUMN + _GAP_X) // 2 + _COLUMN // 2
    y = tops[source.row] + _height(boxes, source.row)
    return f'<path class="arrow" d="M{x} {y} L{x} {tops[target.row] - 2}"/>'
