"""The shared dictionaries of the states, as other libraries look at them.

Here the states are views of one slot and share nothing by dictionary; `SharedState` shows the slot in the old form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ("SharedDict", "SharedState", "ThreadLocalSharedDict")

SharedDict = dict
"""What instances of one class share when a process has one state."""


class SharedState:
    """Class attribute that reads as a new dictionary of what a state knows; empty before there is one.

    Args:
        read: makes the dictionary.

    Example:
        >>> class View:
        ...     _shared_state = SharedState(lambda: {"device": "cpu"})
        >>> View._shared_state
        {'device': 'cpu'}
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._read()


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
