"""Which collective this process called, with which number, from which line of the user's code.

The log is always on: a call costs about a microsecond, because nothing is turned into text before somebody asks.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from types import CodeType

from accel_state.settings.extension import is_library

__all__ = ("Call", "CallLog", "Location", "caller", "locate")


@dataclass(frozen=True)
class Location:
    """A line of the user's code.

    Args:
        path: the file, relative to the working directory where it lies below it.
        line: number of the line.
    """

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Call:
    """One call of a collective.

    Args:
        number: how many calls of this process came before it, plus one.
        operation: name of the function.
        fingerprint: of the structure, shapes, dtypes and arguments; 0 before they were known.
        location: where the user's code called it.
        seconds: how long it took, or takes by now.
    """

    number: int
    operation: str
    fingerprint: int
    location: Location
    seconds: float


class CallLog:
    """The calls of one process on one transport, the newest kept in a ring."""

    __slots__ = ("_current", "_ring", "fingerprint", "number")

    def __init__(self, length: int = 128) -> None:
        self._ring: deque[tuple[int, str, int, CodeType, int, float]] = deque(maxlen=length)
        # Replaced as a whole, because the thread that watches reads it at any moment.
        self._current: tuple[int, str, CodeType, int, float] | None = None
        self.number = 0
        self.fingerprint = 0

    def enter(self, operation: str) -> None:
        """Begin a call."""
        code, line = caller()
        self.fingerprint = 0
        self.number += 1
        self._current = (self.number, operation, code, line, time.monotonic())

    def leave(self) -> None:
        """End the call that was begun."""
        assert self._current is not None
        number, operation, code, line, begun = self._current
        # In this order no call is ever seen as going on that is in the ring.
        self._current = None
        self._ring.append((number, operation, self.fingerprint, code, line, time.monotonic() - begun))

    def active(self) -> Call | None:
        """The call that is going on."""
        current = self._current
        if current is None:
            return None
        number, operation, code, line, begun = current
        location = locate(code.co_filename, line)
        return Call(number, operation, self.fingerprint, location, time.monotonic() - begun)

    def last(self) -> Call | None:
        """The call that is going on, or else the last one."""
        return self.active() or next(iter(self.recent(1)), None)

    def recent(self, count: int | None = None) -> tuple[Call, ...]:
        """The newest completed calls, the newest last."""
        kept = tuple(self._ring)
        return tuple(
            Call(number, operation, fingerprint, locate(code.co_filename, line), seconds)
            for number, operation, fingerprint, code, line, seconds in kept[-count if count else 0 :]
        )


def caller() -> tuple[CodeType, int]:
    """The code of the user, and the line in it, that called what is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def locate(path: str, line: int, folder: str | None = None) -> Location:
    """A line of a file, named as a person in a folder would; by default the working directory."""
    try:
        here = folder or os.getcwd()
    except FileNotFoundError:
        return Location(path, line)
    return Location(path.removeprefix(here + os.sep), line)
