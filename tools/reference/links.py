"""Links from what docstrings put between backticks to the place where it is documented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import griffe

from reference.markdown import code
from reference.published import Entry

__all__ = ("Links", "links_to")


class Links(NamedTuple):
    """Where names lead.

    Args:
        targets: address where something is shown, by each address it has.
        short: the same by names that can only mean one thing.
    """

    targets: Mapping[str, str]
    short: Mapping[str, str]

    def link(self, text: str) -> str:
        """A link to what a text names, or the text as code."""
        name = text.removesuffix("()")
        address = self.targets.get(name) or self.short.get(name)
        if address is None:
            return code(text)
        return f"{{py:obj}}`{text.rpartition('.')[2] if text in self.targets else text} <{address}>`"


def links_to(published: Iterable[Entry]) -> Links:
    """Links to everything that is published.

    A name without dots is linked when it is that of a class: `reduce` may well be an argument.
    """
    targets: dict[str, str] = {}
    short: list[tuple[str, str]] = []
    for entry in published:
        targets |= dict.fromkeys((entry.address, entry.home, *entry.others), entry.address)
        short += _short(entry)
    times = Counter(name for name, _ in short)
    return Links(targets, {name: address for name, address in short if times[name] == 1})


def _short(entry: Entry) -> list[tuple[str, str]]:
    if not isinstance(entry.item, griffe.Class):
        return []
    methods = [
        name
        for name, member in entry.item.all_members.items()
        if not name.startswith("_") and member.is_function and member.has_docstring
    ]
    shown = [(f"{entry.name}.{name}", f"{entry.address}.{name}") for name in methods] if entry.at_the_top else []
    return [(entry.name, entry.address), *shown]
