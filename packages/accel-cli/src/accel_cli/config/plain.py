"""Config files as `accel config` and `accelerate config` write them, read without the YAML library.

Loading that library takes longer than all else that `accel explain` does. Only files of short plain lines are read
here, such as `key: value`, and tables one level deep; anything else in a file leaves all of it to the library.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

__all__ = ("Entry", "plain_entries")

_LINE: Final = re.compile(
    r"(?P<indent> {0,20})(?P<key>[A-Za-z_][A-Za-z0-9_]{0,99}):"
    r"(?: (?P<said>(?P<plain>-?[A-Za-z0-9_./][A-Za-z0-9_./-]*)|'(?P<quoted>[ -&(-~]*)'|\{\}))?"
)
_NOTHING: Final = re.compile(r" *(?:#[ -~]*)?")
_NULL: Final = frozenset({"null", "Null", "NULL"})


class Entry(NamedTuple):
    """One value of a config file.

    Args:
        key: its key; keys of nested tables are joined by dots.
        value: text of a scalar, list of such texts, or None for null and for an empty table.
        line: line of its key, from 1.
    """

    key: str
    value: Any
    line: int


def plain_entries(text: str) -> tuple[Entry, ...] | None:
    """Entries of a file, or None where it holds anything that is not plain, a mistake included."""
    entries: list[Entry] = []
    seen: set[str] = set()
    table: Entry | None = None
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if _NOTHING.fullmatch(line):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        entry = Entry(found["key"], _value(found), number)
        if not found["indent"]:
            table, depth = (entry if found["said"] is None else None), 0
        elif table is None or depth not in (0, len(found["indent"])):
            return None
        else:
            if entries[-1] is table:
                entries.pop()
            depth = len(found["indent"])
            entry = entry._replace(key=f"{table.key}.{entry.key}")
        if entry.key in seen:
            return None
        seen.add(entry.key)
        entries.append(entry)
    return tuple(entries)


def _value(found: re.Match[str]) -> str | None:
    if found["quoted"] is not None:
        return found["quoted"]
    return None if found["plain"] in _NULL else found["plain"]
