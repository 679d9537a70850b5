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

    __slots__ = ("_begun", "_code", "_line", "_operation", "_ring", "active", "fingerprint", "number")

    def __init__(self, length: int = 128) -> None:
        self._ring: deque[tuple[int, str, int, CodeType, int, float]] = deque(maxlen=length)
        self.number = 0
        self.active = False
        self.fingerprint = 0

    def enter(self, operation: str) -> None:
        """Begin a call."""
        self._code, self._line = caller()
        self._operation = operation
        self.fingerprint = 0
        self.number += 1
        self.active = True
        self._begun = time.monotonic()

    def leave(self) -> None:
        """End the call that was begun."""
        seconds = time.monotonic() - self._begun
        self._ring.append((self.number, self._operation, self.fingerprint, self._code, self._line, seconds))
        self.active = False

    def last(self) -> Call | None:
        """The call that is going on, or else the last one."""
        if not self.active:
            return self.recent(1)[0] if self._ring else None
        location = locate(self._code.co_filename, self._line)
        seconds = time.monotonic() - self._begun
        return Call(self.number, self._operation, self.fingerprint, location, seconds)

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


def locate(path: str, line: int) -> Location:
    """A line of a file, named as a person in the working directory would."""
    try:
        here = os.getcwd() + os.sep
    except FileNotFoundError:
        return Location(path, line)
    return Location(path.removeprefix(here), line)
