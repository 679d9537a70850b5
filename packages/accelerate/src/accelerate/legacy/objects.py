"""Plain objects: reached by a dotted name, named for people, dictionaries merged and shared. Never loads torch."""

from __future__ import annotations

import threading
from functools import reduce
from typing import Any

from accel_state.errors import UnknownKind

__all__ = ("SharedDict", "ThreadLocalSharedDict", "get_pretty_name", "merge_dicts", "recursive_getattr")

SharedDict = dict
"""The dictionary that all instances of a state class share. The states of this project share none."""


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Attribute of an attribute, by a name with dots.

    Example:
        >>> import os
        >>> recursive_getattr(os, "path.sep") == os.sep
        True
    """
    return reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function; of anything else that of its class.

    Example:
        >>> get_pretty_name(dict), get_pretty_name({}), get_pretty_name(len)
        ('dict', 'dict', 'len')
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put a dictionary into another, dictionaries inside likewise; `destination` is changed and returned.

    Args:
        source: its values win.
        destination: what they are put into.

    Raises:
        UnknownKind: one has a dictionary where the other has a value.

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
    """Class attribute that is a dictionary shared by all instances, one for each thread.

    Runtimes that start a thread for each device need a state for each.

    Args:
        thread_local: accepted as the surface names it; each thread has its own dictionary either way.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value
