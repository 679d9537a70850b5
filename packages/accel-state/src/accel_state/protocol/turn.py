"""The turn of a call on a transport: one call at a time, never inside another one, each of a known thread.

The processes pair their calls by order: the next call of one with the next call of another. This is wrong if a process
left a call before its end, makes a call inside another one, or makes calls in several threads whose order differs
between processes. So the state of a transport remembers a call that was interrupted, and each header contains the
thread of its call.

The thread in which the run began has no name here, because ranks may be threads of one process. Other threads have the
name that Python or the user gave them, without the numbers that Python counts up for all threads of a process: other
processes may have started more threads. Several threads with the same name differ by the order in which they
were created. Threads of native code, such as those of the backward pass, work for a thread that waits for them.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from accel_state.protocol.header import EagerHeader
    from accel_state.transport.base import Work

__all__ = ("InterruptedCall", "Turn", "is_raised_by_handler")

_NUMBERS: Final = re.compile(r"^(Thread|ThreadPoolExecutor)-\d+(_\d+)?")
"""What Python adds to the names of threads that the user did not name."""

_NATIVE: Final = "Dummy-"
"""First part of the name that `threading` gives to a thread which it has not started."""


class InterruptedCall(NamedTuple):
    """A call that an exception ended while the other processes may have completed it.

    Args:
        is_complete: whether the call ends with its headers, given the lengths of their payloads.
        text: its operation and the line of the user's code.
        cause: name of the exception.
        owes: how many more headers the other processes wait for before that of the next call.
        header: the buffers of its header; None if the header has arrived, or was not sent.
        work: the exchange of its headers, if it is still under way.
        broken: whether the other processes wait for data that this process does not send any more.
    """

    is_complete: Callable[[Sequence[int]], bool]
    text: str
    cause: str
    owes: int
    header: EagerHeader | None = None
    work: Work | None = None
    broken: bool = False


class Turn:
    """Whose turn it is on a transport.

    Args:
        home: the thread in which the run began.
        numbers: number threads with the same name. Not for the transport of a group: each of several threads has
            its own group, and starts when it likes.

    Attributes:
        lock: held during a call; calls of other threads wait.
        thread: identifier of the thread whose call is under way; 0 if there is none.
        call: that call; None if there is none.
        interrupted: a call that was interrupted, until the next one was refused on all processes; else None.
    """

    __slots__ = ("_counts", "_names", "_numbers", "call", "home", "interrupted", "lock", "thread")

    def __init__(self, home: threading.Thread, numbers: bool = True) -> None:
        self.home = home
        self._numbers = numbers
        self._counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.thread = 0
        self.call: Any = None
        self.interrupted: InterruptedCall | None = None
        self._names: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()

    def begin(self, call: object) -> None:
        """Wait for the turn of a call of this thread; the caller has checked that it is not inside another one."""
        self.lock.acquire()
        self.call = call
        self.thread = threading.get_ident()

    def end(self) -> None:
        """End the turn of this thread, if it has it: a signal may have interrupted `begin`."""
        if self.thread == threading.get_ident():
            self.call = None
            self.thread = 0
        # Without a call in between, after which Python could handle a signal.
        try:
            self.lock.release()
        except RuntimeError:
            return

    def is_left(self) -> bool:
        """Whether this thread has left its call although the turn did not end, because a signal interrupted the end."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if any(value is self.call for value in frame.f_locals.values()):
                return False
            frame = frame.f_back
        return True

    def name(self) -> str:
        """The name of this thread, equal on all processes; empty for the thread in which the run began."""
        thread = threading.current_thread()
        if thread is self.home:
            return ""
        if thread not in self._names:
            self._name_namesakes(thread)
        return self._names[thread]

    def _name_namesakes(self, thread: threading.Thread) -> None:
        """Name all threads with the stem of this one, in the order in which they were created.

        Together, and also those that were not started: otherwise the first one to call would be number 1, and that may
        be another one on each process. No number is used again: a thread that has ended may be late elsewhere.
        """
        if thread.name.startswith(_NATIVE):
            self._names[thread] = ""
            return
        stem = _stem_of(thread)
        if not self._numbers:
            self._names[thread] = stem
            return
        for other in sorted((other for other in _existing() if _stem_of(other) == stem), key=_number_of):
            if other not in self._names:
                self._counts[stem] += 1
                self._names[other] = stem if self._counts[stem] == 1 else f"{stem} ({self._counts[stem]})"


def _existing() -> list[threading.Thread]:
    """The threads that run or will run. Python has no public list of those that were not started."""
    created = getattr(threading, "_dangling", ())
    return list(dict.fromkeys([*threading.enumerate(), *(thread for thread in created if thread.ident is None)]))


def _stem_of(thread: threading.Thread) -> str:
    name = _NUMBERS.sub(r"\1", thread.name)
    return name if type(thread) is threading.Thread else f"{type(thread).__qualname__} {name}"


def _number_of(thread: threading.Thread) -> tuple[int, ...]:
    """The numbers in the name; equal for threads that the user named, which are then in the order of their start."""
    match = _NUMBERS.match(thread.name)
    return tuple(map(int, re.findall(r"\d+", match[0]))) if match else ()


def is_raised_by_handler(error: BaseException) -> bool:
    """Whether a signal handler of the script raised an error, for example while this process waited for a backend."""
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
