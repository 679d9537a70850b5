"""`accel runs goodput RUN`: where the time of a run went, as a table, a stacked bar, JSON or a picture."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Final

from accel_state.errors import SettingError
from accel_state.untrusted import printable
from accel_state.watch.goodput import GoodputSummary, read_goodput
from accel_state.watch.record import CATEGORIES

__all__ = ("COLORS", "bar", "draw_goodput", "goodput_json", "goodput_text", "show_goodput")

_UNATTRIBUTED: Final = "unattributed"

COLORS: Final[Mapping[str, str]] = dict(
    zip(
        (*CATEGORIES, _UNATTRIBUTED),
        ("#8da0cb", "#b3cde3", "#fc8d62", "#2ca25f", "#66c2a5", "#e5c494", "#e78ac3", "#a6761d", "#d73027", "#cccccc"),
        strict=True,
    )
)
"""Colour of each category in bars and pictures."""

_MARKS: Final[Mapping[str, str]] = dict(zip(COLORS, "s1d#ecrwx?", strict=True))
"""Letter of each category, for terminals without colour."""

_WIDEST: Final = 100


def show_goodput(run: str, as_json: bool = False, output: Path | None = None) -> int:
    """Print where the time of a run went, and return the exit code.

    Args:
        run: the run's folder.
        as_json: print one line of JSON.
        output: picture to write as well; its name ends with .svg.

    Raises:
        NotFound: the folder does not exist, or contains no time accounts.
        SettingError: none of the accounts' lines can be read, or `output` has another suffix.
    """
    if output is not None and output.suffix != ".svg":
        raise SettingError(
            f"Cannot draw {str(output)!r}.",
            f"The format {output.suffix!r} is not supported." if output.suffix else "The name has no suffix.",
            "Give a name that ends with .svg.",
        )
    summary = read_goodput(run)
    if as_json:
        print(goodput_json(summary))  # noqa: T201 - what the command is for
    else:
        colored = sys.stdout.isatty()
        print(goodput_text(summary, min(shutil.get_terminal_size().columns, _WIDEST), colored))  # noqa: T201
    if output is not None:
        output.write_text(draw_goodput(summary), encoding="utf-8")
        if not as_json:
            print(f"Picture written to {output}")  # noqa: T201
    return 0


def goodput_json(summary: GoodputSummary) -> str:
    """The summary as one line of JSON; times in seconds."""
    figures = ("wall", "restarts", "goodput", "seconds", "unattributed")
    return json.dumps({**asdict(summary), **{name: getattr(summary, name) for name in figures}})


def goodput_text(summary: GoodputSummary, width: int = 80, colored: bool = False) -> str:
    """A headline, a stacked bar and a table.

    Args:
        summary: the run's summary.
        width: number of columns of the terminal.
        colored: whether the terminal shows colours; otherwise each category has a letter.
    """
    count = len(summary.ranks)
    restarts = f"{summary.restarts} restart{'s' if summary.restarts != 1 else ''}"
    state = "running for" if summary.running else "ran for"
    lines = [
        printable(
            f"{summary.folder}: {count} process{'es' if count > 1 else ''} {state} {summary.wall:.1f} s, {restarts}; "
            f"goodput {summary.goodput:.1%}"
        ),
        bar(summary, width, colored),
    ]
    names = max(map(len, COLORS))
    ranks = [f"rank {one.rank}" for one in summary.ranks] if 1 < count <= 8 else []
    lines.append(" " * (names + 4) + f"{'seconds':>10}{'share':>8}" + "".join(f"{rank:>10}" for rank in ranks))
    for name, seconds, own in _rows(summary):
        share = seconds / summary.wall if summary.wall else 0.0
        mark = _painted("##" if colored else f" {_MARKS[name]}", name, colored)
        each = "".join(f"{one:>10.1f}" for one in own) if ranks else ""
        lines.append(f"{mark}  {name:<{names}}{seconds:>10.1f}{share:>8.1%}{each}")
    if summary.damaged_lines:
        lines.append(
            f"{summary.damaged_lines} damaged line{'s were' if summary.damaged_lines > 1 else ' was'} skipped."
        )
    return "\n".join(lines)


def _rows(summary: GoodputSummary) -> Iterator[tuple[str, float, Sequence[float]]]:
    """Each category with its seconds: the mean over the processes, and each process."""
    for name, seconds in summary.seconds.items():
        yield name, seconds, [one.seconds[name] for one in summary.ranks]
    yield _UNATTRIBUTED, summary.unattributed, [one.unattributed for one in summary.ranks]


def bar(summary: GoodputSummary, width: int, colored: bool) -> str:
    """A bar of all categories, in proportion to their seconds."""
    shares = [(name, seconds) for name, seconds, _ in _rows(summary)]
    total = sum(seconds for _, seconds in shares) or 1.0
    text, passed, drawn = "", 0.0, 0
    for name, seconds in shares:
        passed += seconds
        cells = round(passed / total * width) - drawn
        drawn += cells
        text += _painted(("█" if colored else _MARKS[name]) * cells, name, colored)
    return text


def _painted(text: str, name: str, colored: bool) -> str:
    if not colored or not text:
        return text
    red, green, blue = (int(COLORS[name][at : at + 2], 16) for at in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


_BAR: Final = 700
_LINE: Final = 24


def draw_goodput(summary: GoodputSummary) -> str:
    """An SVG picture: a stacked bar for the mean over the processes and for each process, and a legend."""
    rows = list(_rows(summary))
    bars = [("average", [seconds for _, seconds, _ in rows])]
    if 1 < len(summary.ranks) <= 64:
        bars += [(f"rank {one.rank}", [own[index] for _, _, own in rows]) for index, one in enumerate(summary.ranks)]
    height = _LINE * (len(bars) + len(rows) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_BAR + 120} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<text x="8" y="18">{escape(summary.folder)}: {summary.wall:.1f} s, {summary.goodput:.1%} in steps</text>',
    ]
    for index, (label, seconds) in enumerate(bars, 1):
        top = index * _LINE + 6
        parts.append(f'<text x="8" y="{top + 14}">{label}</text>')
        parts += _segments(rows, seconds, top)
    for index, (name, mean, _) in enumerate(rows, len(bars) + 2):
        top = index * _LINE
        share = mean / summary.wall if summary.wall else 0.0
        parts.append(f'<rect x="80" y="{top}" width="14" height="14" fill="{COLORS[name]}"/>')
        parts.append(f'<text x="102" y="{top + 12}">{name}: {mean:.1f} s ({share:.1%})</text>')
    return "\n".join((*parts, "</svg>\n"))


def _segments(rows: Sequence[tuple[str, float, Sequence[float]]], seconds: Sequence[float], top: int) -> Iterator[str]:
    total, left = sum(seconds) or 1.0, 80.0
    for (name, _, _), own in zip(rows, seconds, strict=True):
        width = own / total * _BAR
        if width:
            title = f"<title>{name}: {own:.1f} s</title>"
            yield (
                f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_LINE - 4}" fill="{COLORS[name]}">'
                f"{title}</rect>"
            )
        left += width
