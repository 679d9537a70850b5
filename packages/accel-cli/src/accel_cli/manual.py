"""Help texts written straight from data: quicker than a parser that is built only to describe itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ("render", "width")

_LEFT: Final = 30
_NARROWEST: Final = 50
_WIDEST: Final = 120


def render(usage: str, about: str, sections: Mapping[str, Sequence[tuple[str, str]]], end: str = "") -> str:
    """A help text.

    Args:
        usage: how the command is called.
        about: one sentence on what it does.
        sections: rows of a name and what it means, by heading.
        end: a closing sentence.
    """
    from textwrap import wrap

    columns = width()
    lines = [*wrap(f"usage: {usage}", columns, subsequent_indent="       "), "", *wrap(about, columns)]
    for heading, rows in sections.items():
        lines += ["", f"{heading}:"]
        for name, meaning in rows:
            lines += _row(name, meaning, columns)
    return "\n".join((*lines, *(("", *wrap(end, columns)) if end else ()), ""))


def _row(name: str, meaning: str, columns: int) -> list[str]:
    from textwrap import wrap

    text = wrap(meaning, columns - _LEFT) or [""]
    if len(name) + 4 > _LEFT:
        return [f"  {name}", *(" " * _LEFT + line for line in text)]
    return [f"  {name:<{_LEFT - 2}}{text[0]}".rstrip(), *(" " * _LEFT + line for line in text[1:])]


def width() -> int:
    """Columns of a help text in this terminal."""
    try:
        columns = int(os.environ.get("COLUMNS", "")) or os.get_terminal_size().columns
    except (OSError, ValueError):
        columns = _terminal()
    return min(max(columns - 2, _NARROWEST), _WIDEST)


def _terminal() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 80
