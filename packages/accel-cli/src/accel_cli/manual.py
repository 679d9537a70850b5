"""Help texts written straight from data: quicker than a parser that is built only to describe itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Final

__all__ = ("render",)

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
    width = _width()
    lines = [*wrap(f"usage: {usage}", width, subsequent_indent="       "), "", *wrap(about, width)]
    for heading, rows in sections.items():
        lines += ["", f"{heading}:"]
        for name, meaning in rows:
            lines += _row(name, meaning, width)
    return "\n".join((*lines, *(("", *wrap(end, width)) if end else ()), ""))


def _row(name: str, meaning: str, width: int) -> list[str]:
    text = wrap(meaning, width - _LEFT) or [""]
    if len(name) + 4 > _LEFT:
        return [f"  {name}", *(" " * _LEFT + line for line in text)]
    return [f"  {name:<{_LEFT - 2}}{text[0]}".rstrip(), *(" " * _LEFT + line for line in text[1:])]


def _width() -> int:
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
