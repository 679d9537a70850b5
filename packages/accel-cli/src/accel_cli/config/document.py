"""Reads a YAML or JSON file into entries, each with its line number.

Scalars keep their text: the setting that an entry belongs to knows how to read it, so that `mixed_precision: no` means
the word and not a bool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from accel_cli.config.plain import Entry, plain_entries
from accel_state.errors import NotFound, SettingError

__all__ = ("Entry", "read_document", "read_tables")

# The YAML library takes time for each bracket by the depth at which it stands, and 10 µs for each character of others.
_DEEPEST: Final = 20
_LARGEST: Final = 100_000
_NULL: Final = "tag:yaml.org,2002:null"


def read_document(path: str) -> tuple[Entry, ...]:
    """Entries of a config file in the order in which they stand.

    Raises:
        NotFound: there is no such file.
        SettingError: the file cannot be read, is not valid YAML or JSON, has two values for a key, or is not
            a table of keys.
    """
    asked = f"Cannot read the config file {path}."
    try:
        text = _text(path)
    except FileNotFoundError:
        remedy = "Check the path, or write a file with `accel config`."
        raise NotFound(asked, "There is no such file.", remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"Give a text file of at most {_LARGEST} bytes."
        raise SettingError(asked, f"It cannot be read: {error}.", remedy) from None
    if _depth(text) > _DEEPEST:
        raise SettingError(asked, f"{path} is nested too deep.", "Write a flatter file.")
    entries = None if path.endswith(".json") else plain_entries(text)
    return tuple(_from_library(text, asked, path)) if entries is None else entries


def read_tables(path: str) -> dict[str, Any]:
    """A config file as nested tables of the values that YAML makes of its scalars.

    Raises:
        SettingError: as `read_document`, or a scalar is not what its form or tag says, such as a 31st of February.
    """
    import yaml

    read_document(path)
    try:
        found: dict[str, Any] = yaml.safe_load(_text(path).replace("\t", " ")) or {}
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, OSError) as error:
        asked = f"Cannot read the config file {path}."
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(asked, f"One of its values cannot be made: {reason}.", "Quote that value.") from None
    return found


def _from_library(text: str, asked: str, path: str) -> Iterator[Entry]:
    if path.endswith(".json"):
        _check_json(text, asked, path)
        # YAML forbids tabs, and JSON never has them inside a string.
        text = text.replace("\t", " ")
    root = _compose(text, asked, path)
    if root is None or root.tag == _NULL:
        return
    if root.id != "mapping":
        obstacle = f"{path}:{root.start_mark.line + 1} begins with something other than a table of keys."
        raise SettingError(asked, obstacle, "Write one `key: value` a line.")
    yield from _entries(root, "", asked, path)


def _depth(text: str) -> int:
    """How deep brackets nest, those inside texts counted as well."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _text(path: str) -> str:
    from accel_state.untrusted import read_limited

    found = read_limited(path, _LARGEST, from_shell=True)
    return found.decode().replace("\r\n", "\n").replace("\r", "\n")


def _check_json(text: str, asked: str, path: str) -> None:
    import json

    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        obstacle = f"{path}:{error.lineno}, column {error.colno}: it is not valid JSON: {error.msg}."
        raise SettingError(asked, obstacle, "Correct that line.") from None
    except ValueError as error:
        raise SettingError(asked, f"{path} is not valid JSON: {error}.", "Correct it.") from None


def _compose(text: str, asked: str, path: str) -> Any:
    """The tree of nodes, or None for an empty file."""
    import yaml

    try:
        # An alias can expand to a table of any size, or contain itself.
        events = yaml.parse(text) if "*" in text else ()
        alias = next((event for event in events if isinstance(event, yaml.AliasEvent)), None)
        if alias is None:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        line = "?" if alias.start_mark is None else alias.start_mark.line + 1
        obstacle = f"{path}:{line} uses the alias *{alias.anchor}."
        raise SettingError(asked, obstacle, "Write the values out.")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}, column {mark.column + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SettingError(asked, f"{where}: it is not valid YAML: {problem}.", "Correct that line.") from None
    except RecursionError:
        raise SettingError(asked, f"{path} is nested too deep.", "Write a flatter file.") from None


def _entries(table: Any, prefix: str, asked: str, path: str) -> Iterator[Entry]:
    seen: dict[str, tuple[int, Any]] = {}
    for key_node, value_node in table.value:
        line = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            raise SettingError(asked, f"{path}:{line} has a key that is not text.", "Write one `key: value` a line.")
        key = prefix + key_node.value
        first = seen.setdefault(key, (line, value_node))
        if first[1] is not value_node:
            if value_node.id == "scalar" == first[1].id and value_node.value == first[1].value:
                continue
            obstacle = f"Line {line} repeats the key {key!r} of line {first[0]}."
            raise SettingError(asked, obstacle, "Remove one of the two lines.")
        yield from _entry(key, value_node, line, asked, path)


def _entry(key: str, node: Any, line: int, asked: str, path: str) -> Iterator[Entry]:
    if node.id == "mapping" and node.value:
        if key.count(".") >= 8:
            raise SettingError(asked, f"{path}:{line} is nested too deep.", "Write a flatter file.")
        yield from _entries(node, key + ".", asked, path)
    elif node.id == "mapping":
        yield Entry(key, None, line)
    elif node.id == "sequence":
        yield Entry(key, [_scalar(item, key, asked, path) for item in node.value], line)
    else:
        yield Entry(key, _scalar(node, key, asked, path), line)


def _scalar(node: Any, key: str, asked: str, path: str) -> str | None:
    if node.id != "scalar":
        obstacle = f"{path}:{node.start_mark.line + 1}: the list {key!r} holds another list or table."
        raise SettingError(asked, obstacle, "Write plain values into it.")
    if node.tag == _NULL:
        return None
    text: str = node.value
    return text
