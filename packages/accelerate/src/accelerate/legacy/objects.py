"""Plain Python objects: dotted names, readable names, and merging dictionaries. Never loads torch."""

from __future__ import annotations

from functools import reduce
from typing import Any

from accel_state.errors import UnknownKind


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Get an attribute by a dotted name.

    Example:
        >>> import os
        >>> recursive_getattr(os, "path.sep") == os.sep
        True
    """
    return reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, or the name of another object's class.

    Example:
        >>> get_pretty_name(dict), get_pretty_name({}), get_pretty_name(len)
        ('dict', 'dict', 'len')
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge a dictionary and its nested dictionaries into another; `destination` is changed and returned.

    Args:
        source: the dictionary with the values to add or replace.
        destination: the dictionary that receives them.

    Raises:
        UnknownKind: for the same key, one has a dictionary and the other a value.

    Example:
        >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}})
        {'a': {'y': 2, 'x': 1}}
    """
    for key, value in source.items():
        if not isinstance(value, dict):
            destination[key] = value
            continue
        inner = destination.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UnknownKind(
                f"Cannot merge two dictionaries, both with the key {key!r}.",
                f"One has a dictionary there, the other {inner!r}.",
                "Rename one of the two.",
            )
        merge_dicts(value, inner)
    return destination
