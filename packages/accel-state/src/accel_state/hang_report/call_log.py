"""Where the code of this process is: the collective that it called, its main thread, and where it raised an error.

The log of calls is always on: a call costs about a microsecond, because nothing becomes text before somebody reads it.
The main thread is captured only to explain a failure: on Python 3.11 a garbage collection can leave the frames of a
running thread dangling while another thread walks them. So a capture is rare, and no collection may begin meanwhile.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from types import CodeType, FrameType
from typing import Final, NamedTuple

from accel_state.settings.extension import is_library

__all__ = (
    "IMPORT",
    "Call",
    "CallLog",
    "Location",
    "UserFrame",
    "call_text",
    "caller",
    "format_ranks",
    "frame_of_error",
    "locate",
    "main_thread_frame",
)


class Location(NamedTuple):
    """A line of the user's code.

    Args:
        path: the file, relative to the working directory if it is below it.
        line: number of the line.
    """

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


class Call(NamedTuple):
    """One call of a collective.

    Args:
        number: how many calls of this process came before it, plus one.
        operation: name of the function.
        fingerprint: of the structure, shapes, dtypes and arguments; 0 before they were known.
        location: where the user's code called it.
        seconds: how long it took, or has taken so far.
        group: what messages call the processes that call it together; empty when they are all of the run.
    """

    number: int
    operation: str
    fingerprint: int
    location: Location
    seconds: float
    group: str = ""

    def __str__(self) -> str:
        return f"{call_text(self.operation, self.group, str(self.location))} (call {self.number})"


def call_text(operation: str, group: str, location: str) -> str:
    """A call in words: "gather() in the group 'tp' of ranks 0, 1 at eval.py:8"."""
    return f"{operation}(){f' in {group}' if group else ''}{f' at {location}' if location else ''}"


class CallLog:
    """The calls of one process on one transport, the newest kept in a ring.

    Calls of a group of processes have a log and numbers of their own. It shares what was called with the log of the
    whole run, which shows both: the calls of several groups may be active at the same time, in several threads.

    Args:
        length: how many completed calls are kept.
        world: the log of the whole run.
        group: what messages call the group.

    Attributes:
        number: calls that were begun.
        messages: steps of streams of messages that were completed; equal on processes that are at the same step.
        exchanges: exchanges of headers that this process has begun to wait for.
    """

    __slots__ = ("_active", "_group", "_ring", "exchanges", "fingerprint", "messages", "number")

    def __init__(self, length: int = 128, world: CallLog | None = None, group: str = "") -> None:
        self._ring: deque[tuple[int, str, int, CodeType, int, float, str]]
        self._ring = deque(maxlen=length) if world is None else world._ring
        # By the log that each call is of. The thread of the monitor reads it at any moment, so values are replaced.
        self._active: dict[int, tuple[int, str, CodeType, int, float, CallLog]] = {} if world is None else world._active
        self._group = group
        self.number = 0
        self.fingerprint = 0
        self.messages = 0
        self.exchanges = 0

    def enter(self, operation: str) -> tuple[CodeType, int]:
        """Begin a call; returns the code of the user, and the line in it, that called."""
        code, line = caller()
        self.fingerprint = 0
        self.number += 1
        self._active[id(self)] = (self.number, operation, code, line, time.monotonic(), self)
        return code, line

    def leave(self) -> None:
        """End the call that `enter` began."""
        # In this order, nobody ever sees a call as active that is in the ring.
        number, operation, code, line, begun, _ = self._active.pop(id(self))
        self._ring.append((number, operation, self.fingerprint, code, line, time.monotonic() - begun, self._group))

    def active(self) -> Call | None:
        """The call of this log that this process is in, or else the oldest of another group."""
        current = self._active.get(id(self))
        if current is None:
            others = list(self._active.values())
            if not others:
                return None
            current = min(others, key=lambda call: call[4])
        number, operation, code, line, begun, log = current
        location = locate(code.co_filename, line)
        return Call(number, operation, log.fingerprint, location, time.monotonic() - begun, log._group)

    def last(self) -> Call | None:
        """The call that this process is in, or else the last one."""
        return self.active() or next(iter(self.recent(1)), None)

    def recent(self, count: int | None = None) -> tuple[Call, ...]:
        """The newest completed calls, the newest last."""
        kept = tuple(self._ring)
        return tuple(
            Call(number, operation, fingerprint, locate(code.co_filename, line), seconds, group)
            for number, operation, fingerprint, code, line, seconds, group in kept[-count if count else 0 :]
        )


def format_ranks(members: list[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(members):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(members) == 1 else f"ranks {text}"


def caller() -> tuple[CodeType, int]:
    """The code of the user, and the line in it, that led to this call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def locate(path: str, line: int, folder: str | None = None) -> Location:
    """A line of a file, relative to a folder; by default the working directory."""
    try:
        here = folder or os.getcwd()
    except FileNotFoundError:
        return Location(path, line)
    return Location(path.removeprefix(here + os.sep), line)


IMPORT: Final = "import"
"""`UserFrame.inside` of a thread that imports a module."""

_IMPORTING: Final = "<frozen importlib"

_DECORATORS: Final = frozenset({"_call_impl", "_wrapped_call_impl", "decorate_context", "inner", "wrapped", "wrapper"})
"""Wrappers around the function whose name is of use."""


class UserFrame(NamedTuple):
    """The innermost frame of the user's code in a thread.

    Args:
        location: the innermost line of the user's code.
        inside: the library function that was called there; empty when there is none.
    """

    location: Location
    inside: str


def main_thread_frame() -> UserFrame | None:
    """Where the main thread is; None when it runs no code of the user."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        outwards = []
        while frame is not None:
            outwards.append((frame, frame.f_lineno))
            frame = frame.f_back
        return _innermost(outwards)
    finally:
        if collecting:
            gc.enable()


def frame_of_error(error: BaseException) -> UserFrame | None:
    """Where an exception was raised; None where no code of the user was running."""
    inwards, trace = [], error.__traceback__
    while trace is not None:
        inwards.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return _innermost(inwards[::-1])


def _innermost(outwards: list[tuple[FrameType, int]]) -> UserFrame | None:
    inside = ""
    for frame, line in outwards:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if is_library(module):
            inside = inside if code.co_name in _DECORATORS and inside else code.co_name
        elif module.partition(".")[0] not in sys.stdlib_module_names:
            return UserFrame(locate(code.co_filename, line), inside)
        elif code.co_filename.startswith(_IMPORTING):
            inside = IMPORT
    return None
