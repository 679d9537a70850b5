"""Pieces of MyST markdown: tables, lists and fences, and prose of docstrings made safe for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

__all__ = ("cell", "code", "fence", "page", "prose", "table")

_CODE = re.compile(r"(`[^`]*`)")
_ADDRESS = re.compile(r"(https?://[^\s)]*[^\s).,])")
_SPECIAL = re.compile(r"([\\*_<\[\]{$#~|])")
_ITEM = re.compile(r"(?:[-*+]|\d+[.)]) ")

Link = Callable[[str], str]
"""Makes a link, or plain code, of what stands between backticks."""


def code(text: str) -> str:
    """Text as inline code, also where it holds backticks or the bar that ends the cell of a table."""
    marks = "``" if "`" in text else "`"
    padding = " " if "`" in text else ""
    return f"{marks}{padding}{text}{padding}{marks}"


def prose(text: str, link: Link = code) -> str:
    """Plain text in which only backticks mean something, as paragraphs and lists of markdown.

    Example:
        >>> prose("Files are named `<id>`, <id> being *the* number.")
        'Files are named `<id>`, \\\\<id> being \\\\*the\\\\* number.'
    """
    return "\n\n".join(_paragraph(part, link) for part in re.split(r"\n\s*\n", text.strip()))


def _paragraph(text: str, link: Link) -> str:
    lines: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if lines and not _ITEM.match(line):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(_item(line, link) for line in lines)


def _item(line: str, link: Link) -> str:
    mark = _ITEM.match(line)
    start = mark.group() if mark else ""
    return start + _inline(line.removeprefix(start), link)


def _inline(text: str, link: Link) -> str:
    parts = _CODE.split(text)
    return "".join(link(part[1:-1]) if index % 2 else _plain(part) for index, part in enumerate(parts))


def _plain(text: str) -> str:
    parts = _ADDRESS.split(text)
    return "".join(
        f"<{part}>" if index % 2 else _SPECIAL.sub(r"\\\1", part).replace("**", r"\*\*")
        for index, part in enumerate(parts)
    )


def cell(text: str) -> str:
    """Markdown as the cell of a table."""
    return " ".join(re.sub(r"(?<!\\)\|", r"\\|", text).split())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, whose cells are markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(cell, line)) + " |" for line in lines]


def fence(text: str, language: str = "text") -> list[str]:
    """Lines of a block of code."""
    return [f"```{language}", *text.splitlines(), "```"]


def page(lines: Iterable[str]) -> str:
    """A document of lines, without several empty lines in a row."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
