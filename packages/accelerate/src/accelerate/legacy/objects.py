"""Plain Python objects: dotted names, readable names, merging and sharing dictionaries. Never loads torch."""

from __future__ import annotations

import threading
from functools import reduce
from typing import Any

from accel_state.errors import UnknownKind

SharedDict = dict
"""The type of the dictionary that instances of an original state class share. This project's states do not use it."""


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


class ThreadLocalSharedDict(threading.local):
    """Class attribute: a dictionary that all instances share within a thread.

    Runtimes with one thread per device need a separate state for each thread.

    Args:
        thread_local: accepted for compatibility and ignored; each thread always has its own dictionary.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value
