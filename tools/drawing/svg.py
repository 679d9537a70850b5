"""Draws data as SVG that can be read on light and on dark pages, and in any width.

    drawing = Drawing("Loss", "Two curves that are equal.", 480, 200)
    axes = Axes(drawing, (40, 10, 430, 160), x=(0, 100), y=(0, 3))
    axes.grid("step", "loss")
    axes.line([(0, 3), (100, 1)], "blue")
    drawing.svg()

A part of a drawing has the name of a colour as its class; `STYLE` says what each colour is on light and on dark pages.
The same data always give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Literal

__all__ = ("FONT", "STYLE", "Anchor", "Axes", "Drawing", "ticks")

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]

FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"

STYLE = f"""
  svg {{ --ink: #3f4a59; --note: #5f6a79; --blue: #2563c4; --orange: #b45f06; --red: #c0392b; --green: #1d7d52;
        --purple: #7a4fc0; --gray: #8a94a3 }}
  @media (prefers-color-scheme: dark) {{
    svg {{ --ink: #cdd5e0; --note: #9aa5b4; --blue: #6ea4ff; --orange: #f0a04b; --red: #ff8073; --green: #5fc796;
          --purple: #b99bf0; --gray: #7f8a99 }}
  }}
  .ink {{ color: var(--ink) }} .note {{ color: var(--note) }} .blue {{ color: var(--blue) }}
  .red {{ color: var(--red) }}
  .orange {{ color: var(--orange) }} .green {{ color: var(--green) }} .purple {{ color: var(--purple) }}
  .gray {{ color: var(--gray) }}
  text {{ fill: currentColor; font: 12px {FONT} }}
  .small {{ font-size: 10.5px }} .strong {{ font-weight: 600 }}
  .line {{ fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round }}
  .wide {{ stroke-width: 6; stroke-opacity: 0.4 }} .hair {{ stroke-width: 1; stroke-opacity: 0.35 }}
  .dashed {{ stroke-dasharray: 4 3; stroke-width: 1.2 }}
  .fill {{ fill: currentColor }} .pale {{ fill-opacity: 0.45 }} .faint {{ fill-opacity: 0.22 }}
"""
"""What the classes of all drawings look like."""


def _number(value: float) -> str:
    """A coordinate with one digit behind the point, which is less than a pixel."""
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """An SVG to which parts are added, from back to front.

    Args:
        title: what it shows, in a few words; also its tooltip.
        about: the same for people who do not see it.
        width: units from left to right; a unit is a pixel where the picture has its natural size.
        height: units from top to bottom.
        style: rules beside `STYLE`.
    """

    def __init__(self, title: str, about: str, width: float, height: float, style: str = "") -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(width)} {_number(height)}" '
            f'width="{_number(width * 1.4)}" role="img">\n'
            f"<title>{escape(title)}</title>\n<desc>{escape(about)}</desc>\n<style>{STYLE}{style}</style>\n"
        )
        self._parts: list[str] = []

    def text(self, at: Point, words: str, look: str = "note", anchor: Anchor = "start") -> None:
        """Adds words whose baseline begins, has its middle or ends at a point."""
        x, y = map(_number, at)
        self._parts.append(f'<text class="{look}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, corner: Point, size: Point, look: str) -> None:
        """Adds a rectangle from its upper left corner; one without a width or height is left out."""
        if min(size) > 0:
            x, y, width, height = map(_number, (*corner, *size))
            self._parts.append(f'<rect class="fill {look}" x="{x}" y="{y}" width="{width}" height="{height}"/>')

    def path(self, points: Iterable[Point], look: str, closed: bool = False) -> None:
        """Adds a line through points, or the area that they enclose."""
        steps = " L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        kind = "fill" if closed else "line"
        self._parts.append(f'<path class="{kind} {look}" d="M{steps}{" Z" if closed else ""}"/>')

    def add(self, part: str) -> None:
        """Adds a part that is written as SVG."""
        self._parts.append(part)

    def svg(self) -> str:
        """The whole file."""
        return self._head + "\n".join(self._parts) + "\n</svg>\n"


class Axes:
    """A region of a drawing with two linear scales.

    Args:
        drawing: where it is.
        region: left, top, width and height.
        x: values at the left and at the right.
        y: values at the bottom and at the top.
    """

    def __init__(self, drawing: Drawing, region: tuple[float, float, float, float], x: Point, y: Point) -> None:
        self._drawing, self._region, self._x, self._y = drawing, region, x, y

    def at(self, x: float, y: float) -> Point:
        """Where a point of the data is in the drawing."""
        left, top, width, height = self._region
        across, up = (x - self._x[0]) / (self._x[1] - self._x[0]), (y - self._y[0]) / (self._y[1] - self._y[0])
        return left + across * width, top + (1 - up) * height

    def grid(self, x_label: str, y_label: str, y_text: Callable[[float], str] = "{:g}".format) -> None:
        """Adds lines and numbers, and what both directions are."""
        left, top, width, height = self._region
        for value in ticks(*self._y, 4):
            self._drawing.path([self.at(self._x[0], value), self.at(self._x[1], value)], "note hair")
            self._drawing.text((left - 6, self.at(0, value)[1] + 4), y_text(value), "note small", "end")
        for value in ticks(*self._x, 6):
            self._drawing.text((self.at(value, 0)[0], top + height + 15), f"{value:g}", "note small", "middle")
        self._drawing.text((left + width, top + height + 30), x_label, "note", "end")
        self._drawing.text((left, top - 7), y_label)

    def line(self, points: Iterable[Point], look: str) -> None:
        """Adds a curve."""
        self._drawing.path([self.at(*point) for point in points], look)

    def dots(self, points: Iterable[Point], look: str) -> None:
        """Adds a dot for each point."""
        for x, y in (self.at(*point) for point in points):
            self._drawing.add(f'<circle class="fill {look}" cx="{_number(x)}" cy="{_number(y)}" r="2.4"/>')

    def area(self, xs: Sequence[float], lower: Sequence[float], upper: Sequence[float], look: str) -> None:
        """Adds the area between two curves."""
        there, back = zip(xs, upper, strict=True), zip(reversed(xs), reversed(lower), strict=True)
        self._drawing.path([self.at(*point) for point in (*there, *back)], look, closed=True)

    def mark(self, x: float, words: str, look: str) -> None:
        """Adds a dashed line from bottom to top, with words above it, which begin there."""
        self._drawing.path([self.at(x, self._y[0]), self.at(x, self._y[1])], f"{look} dashed")
        place, top = self.at(x, self._y[1])
        self._drawing.text((place, top - 7), words, f"{look} small")


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two values, at most about `most` of them.

    Example:
        >>> ticks(0, 47, 5)
        [0, 10, 20, 30, 40]
    """
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
