"""Draws what a terminal printed, as a recording that plays once and ends with all lines shown.

The recording is CSS inside the SVG: no script, and no motion where the reader asked for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ("recording",)

_LINE, _COLUMN, _EDGE, _BAR = 17.0, 7.25, 14.0, 26.0
_COLUMNS = 98
_LONGEST = 5.0
"""Seconds of the whole recording; what moves for longer would need a button that stops it."""

_STYLE = """
  rect { fill: #14181f } circle { fill: #4a5464 }
  text { fill: #d5dbe5; font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }
  .command { fill: #8fb8ff; font-weight: 600 } .comment { fill: #8b96a6 }
  @media (prefers-reduced-motion: no-preference) { .later { animation: appear 0.15s both } }
  @keyframes appear { from { opacity: 0 } }
"""


def recording(title: str, about: str, lines: Sequence[tuple[float, str]]) -> str:
    """The SVG of a terminal.

    Args:
        title: what it shows.
        about: the same for people who do not see it.
        lines: when each was printed, in seconds from the start, and its text; those that begin with "$ " are commands,
            those that begin with "# " are notes.
    """
    lines = [(moment, part) for moment, text in lines for part in _wrapped(text)]
    columns = max(len(text) for _, text in lines)
    width, height = 2 * _EDGE + columns * _COLUMN, _BAR + 2 * _EDGE + (len(lines) - 1) * _LINE + 4
    last = max(moment for moment, _ in lines) or 1.0
    parts = []
    for number, (moment, text) in enumerate(lines):
        kind = {"$ ": "command", "# ": "comment"}.get(text[:2], "printed")
        delay = moment / last * (_LONGEST - 0.2)
        place = f'x="{_EDGE:g}" y="{_BAR + _EDGE + number * _LINE:g}"'
        parts.append(
            f'<text class="{kind} later" style="animation-delay: {delay:.2f}s" {place} xml:space="preserve">'
            f"{escape(text)}</text>"
        )
    dots = "".join(f'<circle cx="{18 + 16 * number}" cy="14" r="4.5"/>' for number in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(about)}</desc>\n<style>{_STYLE}</style>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8"/>{dots}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _wrapped(text: str) -> list[str]:
    """A line as a terminal shows it, which goes on in the next row at its edge."""
    return [text[start : start + _COLUMNS] for start in range(0, max(len(text), 1), _COLUMNS)]
