"""The position of this process: the collective that it called, the line of its main thread, the line of an error.

The log of calls is always on: a call costs about a microsecond, because entries become text only when they are read.
The main thread is captured only to explain a failure: on Python 3.11 a garbage collection can free the frames of a
running thread while another thread walks them. Therefore a capture is rare, and no collection may begin during it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from accel_state.library import caller, is_library
from accel_state.watch.record import STATUS_RECORD, WAITING

__all__ = (
    "IMPORT",
    "Call",
    "CallLog",
    "Location",
    "UserFrame",
    "call_text",
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
        number: number of the call on this process, from 1.
        operation: name of the function.
        fingerprint: fingerprint of the structure, shapes, dtypes and arguments; 0 before they are known.
        location: the line of the user's code that called it.
        seconds: how long it took, or has taken so far.
        group: name of its group in messages; empty for all processes of the run.
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
    """A call as text: "gather() in the group 'tp' of ranks 0, 1 at eval.py:8"."""
    return f"{operation}(){f' in {group}' if group else ''}{f' at {location}' if location else ''}"


class CallLog:
    """The calls of one process on one transport; a ring buffer has the newest ones.

    Each group of processes has its own log and its own numbers. It passes its calls on to the log of the whole run,
    which shows both, because calls of several groups may be active at the same time in several threads. The time of a
    call is charged to waiting.

    Args:
        length: how many completed calls are kept.
        world: the log of the whole run.
        group: name of the group in messages.

    Attributes:
        number: number of calls so far.
        exchanges: number of header exchanges for which this process has begun to wait.
    """

    __slots__ = ("_active", "_before", "_group", "_ring", "exchanges", "fingerprint", "number")

    def __init__(self, length: int = 128, world: CallLog | None = None, group: str = "") -> None:
        self._ring: deque[tuple[int, str, int, CodeType, int, float, str]]
        self._ring = deque(maxlen=length) if world is None else world._ring
        # By the log of each call. The monitor's thread may read it at any moment, so values are replaced as a whole.
        self._active: dict[int, tuple[int, str, CodeType, int, float, CallLog]] = {} if world is None else world._active
        self._group = group
        self._before: int | None = None
        self.number = 0
        self.fingerprint = 0
        self.exchanges = 0

    def enter(self, operation: str) -> tuple[CodeType, int]:
        """Begin a call; return the code object of the caller in the user's code, and the line."""
        code, line = caller()
        self.fingerprint = 0
        self.number += 1
        self._active[id(self)] = (self.number, operation, code, line, time.monotonic(), self)
        self._before = STATUS_RECORD.begin(WAITING)
        return code, line

    def leave(self) -> None:
        """End the call that `enter` began."""
        if self._before is not None:
            STATUS_RECORD.enter(self._before)
        # In this order, no reader sees a call both as active and in the ring.
        number, operation, code, line, begun, _ = self._active.pop(id(self))
        self._ring.append((number, operation, self.fingerprint, code, line, time.monotonic() - begun, self._group))

    def active(self) -> Call | None:
        """The active call of this log, or else the oldest active call of another group."""
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
        """The active call, or else the last completed one."""
        return self.active() or next(iter(self.recent(1)), None)

    def recent(self, count: int | None = None) -> tuple[Call, ...]:
        """The newest completed calls, the newest last."""
        kept = tuple(self._ring)
        return tuple(
            Call(number, operation, fingerprint, locate(code.co_filename, line), seconds, group)
            for number, operation, fingerprint, code, line, seconds, group in kept[-count if count else 0 :]
        )


def format_ranks(members: list[int]) -> str:
    """Ranks as text: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(members):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(members) == 1 else f"ranks {text}"


def locate(path: str, line: int, folder: str | None = None) -> Location:
    """A line of a file, relative to a folder; by default the working directory."""
    try:
        here = folder or os.getcwd()
    except FileNotFoundError:
        return Location(path, line)
    return Location(path.removeprefix(here + os.sep), line)


IMPORT: Final = "import"
"""`UserFrame.inside` of a thread that imports a module."""

_IMPORTLIB_PREFIX: Final = "<frozen importlib"

_PASSED_MODULES: Final = ("torch._ops", "torch.utils._contextlib", "torch._tensor")
"""Modules of torch through which calls of collectives and backward passes go."""

_COMMUNICATING_MODULES: Final = ("torch.distributed.", "torch.nn.parallel.distributed.")
"""Modules that exchange data with other processes, with a dot behind each name."""

_AUTOGRAD_MODULE: Final = "torch.autograd"

_CHECKPOINT_MODULE: Final = "torch.distributed.checkpoint"
"""A part of torch.distributed that waits for files."""

_WRAPPER_NAMES: Final = frozenset(
    {"_call_impl", "_wrapped_call_impl", "decorate_context", "inner", "wrapped", "wrapper"}
)
"""Wrapper functions; reports name the function that they call instead."""


class UserFrame(NamedTuple):
    """The innermost frame of the user's code in a thread.

    Args:
        location: the innermost line of the user's code.
        inside: the library function that was called there; empty when there is none.
        waits_for_others: whether that function is a collective of torch, or something of torch that contains one.
        in_backward: whether that is a backward pass, which also computes.
    """

    location: Location
    inside: str
    waits_for_others: bool = False
    in_backward: bool = False


def main_thread_frame() -> UserFrame | None:
    """The position of the main thread; None if it runs no code of the user."""
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
    """The position at which an exception was raised; None if no code of the user was running."""
    inwards, trace = [], error.__traceback__
    while trace is not None:
        inwards.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return _innermost(inwards[::-1])


def _innermost(outwards: list[tuple[FrameType, int]]) -> UserFrame | None:
    inside, waits, backward = "", None, False
    for frame, line in outwards:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        in_python = module.partition(".")[0] in sys.stdlib_module_names
        if waits is None and not in_python and not module.startswith(_PASSED_MODULES):
            # Only the innermost module counts: one that it calls waits for something else, such as a compiler.
            waits, backward = _waits_for_others(module), module.startswith(_AUTOGRAD_MODULE)
        if is_library(module):
            inside = inside if code.co_name in _WRAPPER_NAMES and inside else code.co_name
        elif not in_python:
            return UserFrame(locate(code.co_filename, line), inside, bool(waits), backward)
        elif code.co_filename.startswith(_IMPORTLIB_PREFIX):
            inside = IMPORT
    return None


def _waits_for_others(module: str) -> bool:
    """Whether the functions of a module wait for other processes, as those of torch.distributed do.

    A backward pass does if there are other processes: it averages gradients in native code.
    """
    if module.startswith(_AUTOGRAD_MODULE):
        distributed: Any = sys.modules.get("torch.distributed")
        return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())
    return f"{module}.".startswith(_COMMUNICATING_MODULES) and not module.startswith(_CHECKPOINT_MODULE)
