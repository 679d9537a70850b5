"""The part of the page of settings on what can only be given in a script: fields of classes of settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import griffe

from reference.described import argument_meanings, first_sentence
from reference.links import Links
from reference.markdown import code, table
from reference.published import Entry

__all__ = ("fields_only_in_scripts",)

_CLASS_OF_SETTINGS = re.compile(r"(Plugin|Kwargs|Config|Configuration)$")
_HEAD = ("argument", "meaning", "type", "default")


def fields_only_in_scripts(published: Iterable[Entry], known: Iterable[type], links: Links) -> Iterator[str]:
    """Lines: a table for each class of settings that has fields without flag, variable or key.

    Args:
        published: names among which such classes are found, by what they are called.
        known: classes with declared settings, whose fields are on the page already.
        links: where names lead.
    """
    declared = {f"{cls.__module__}.{cls.__qualname__}": set(_declared(cls)) for cls in known}
    for entry in published:
        if (
            isinstance(entry.item, griffe.Class)
            and "dataclass" in entry.item.labels
            and _CLASS_OF_SETTINGS.search(entry.name)
        ):
            rows = list(_rows(entry.item, declared.get(entry.home, set()), links))
            if rows:
                said = first_sentence(entry.item, links.link)
                yield from (f"### {entry.name} in scripts", "", said, "", f"In {links.link(entry.address)}.", "")
                yield from (*table(_HEAD, rows), "")


def _declared(cls: type) -> Iterable[str]:
    from accel_state.settings.schema import settings_of

    return settings_of(cls)


def _rows(item: griffe.Class, declared: set[str], links: Links) -> Iterator[tuple[str, ...]]:
    meanings: dict[str, str] = {}
    for source in (*reversed(item.mro()), item):
        meanings |= argument_meanings(source, links.link)
    for one in list(item.parameters)[1:]:
        if one.name not in declared and not one.name.startswith("_"):
            default = "needed" if one.default is None else code(" ".join(str(one.default).split()))
            yield code(one.name), meanings.get(one.name, ""), code(str(one.annotation)), default
