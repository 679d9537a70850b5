"""Docstrings in Google style as lines of markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

from reference.markdown import Link, code, fence, prose

__all__ = ("argument_meanings", "described", "first_sentence", "unknown_arguments")

_OPTIONS = {"warn_unknown_params": False, "warn_missing_types": False, "warnings": False}


def described(item: griffe.Object, link: Link = code) -> list[str]:
    """The docstring of an object as markdown."""
    lines: list[str] = []
    for section in _sections(item):
        lines += [*_section(section, link), ""]
    return lines


def first_sentence(item: griffe.Object, link: Link = code) -> str:
    """What an object is for, in one sentence of markdown."""
    text = item.docstring.value.strip().partition("\n\n")[0] if item.docstring else ""
    return prose(" ".join(text.split()), link)


def argument_meanings(item: griffe.Object, link: Link = code) -> dict[str, str]:
    """What a docstring says about each argument, by its name."""
    meanings: dict[str, str] = {}
    for section in _sections(item):
        if section.kind is griffe.DocstringSectionKind.parameters:
            for one in section.value:
                meaning = prose(" ".join(one.description.split()), link)
                meanings |= {name.strip().lstrip("*"): meaning for name in one.name.split(",")}
    return meanings


def unknown_arguments(item: griffe.Class | griffe.Function) -> list[str]:
    """Names that a docstring describes as arguments, and that the object does not take."""
    takers = [item, *(member for name, member in item.members.items() if name == "__new__")]
    parameters = [parameter for taker in takers for parameter in getattr(taker, "parameters", ())]
    taken = {parameter.name.lstrip("*") for parameter in parameters} | set(item.all_members)
    return [name for name in argument_meanings(item) if name not in taken]


def _sections(item: griffe.Object) -> list[Any]:
    return item.docstring.parse("google", **_OPTIONS) if item.docstring else []


def _section(section: Any, link: Link) -> Iterator[str]:
    kind = section.kind
    if kind is griffe.DocstringSectionKind.text:
        yield from prose(section.value, link).splitlines()
    elif kind is griffe.DocstringSectionKind.admonition:
        yield from ("**Example**", "", *_example(section.value.description, link))
    else:
        yield from (f"**{_TITLES[kind]}**", "")
        yield from (_row(one, link) for one in section.value)


def _row(one: Any, link: Link) -> str:
    meaning = prose(" ".join(one.description.split()), link)
    name = getattr(one, "name", None) or str(one.annotation or "")
    names = ", ".join(
        link(part.strip()) if not hasattr(one, "name") else code(part.strip()) for part in name.split(",")
    )
    return f"- {names}: {meaning}" if name else f"- {meaning}"


_TITLES = {
    griffe.DocstringSectionKind.parameters: "Arguments",
    griffe.DocstringSectionKind.attributes: "Attributes",
    griffe.DocstringSectionKind.raises: "Raises",
    griffe.DocstringSectionKind.returns: "Returns",
    griffe.DocstringSectionKind.yields: "Yields",
}


def _example(text: str, link: Link) -> Iterator[str]:
    """Text in which lines of an interpreter stand."""
    for part in text.strip().split("\n\n"):
        shown = part.replace("  # doctest: +SKIP", "")
        yield from fence(shown, "pycon") if ">>>" in part else prose(shown, link).splitlines()
        yield ""
