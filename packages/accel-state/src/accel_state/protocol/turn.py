"""The turn of a call on a transport: one call at a time, never inside another one, each of a known thread.

The processes pair their calls by order: the next call of one with the next call of another. This is wrong if a process
left a call before its end, makes a call inside another one, or makes calls in several threads whose order differs
between processes. So the state of a transport remembers a call that was interrupted, and each header contains the
thread of its call.

The thread in which the run began has no name here, because ranks may be threads of one process. Threads of native code,
such as those of the backward pass, work for a thread that waits for them, and have none either. The others have the
name that the user gave them. The workers of a pool have one name together, since chance decides which of them gets a
task. Python numbers threads and pools without a name over the whole process, and other processes may have started more
of them, so that here each kind is numbered in the order of start.

Threads with one name, such as those of a pool, look the same here. So a call that begins in another thread than the
first during a call is refused on all processes, as are all later ones of threads with that name. What is not noticed:
two tasks of a pool, or two threads with one name, whose calls have not overlapped yet and come in another order on each
process; and threads without names that were started in another order on each process.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from accel_state.protocol.header import EagerHeader
    from accel_state.transport.base import Work

__all__ = ("InterruptedCall", "InterruptedExchange", "Turn", "is_raised_by_handler")

_NUMBERED_THREAD: Final = re.compile(r"^((?:Thread|ThreadPoolExecutor)-\d+)(?:_\d+$)?")
"""Names with a number of Python, from threads and pools that the user did not name; first the part that is unique."""

_WORKER_NUMBERS: Final = {
    "concurrent.futures.thread": re.compile(r"_\d+$"),
    "multiprocessing.pool": re.compile(r"-\d+"),
}
"""What the names of workers of a pool differ in, by the module that runs them."""

_NATIVE_THREAD_PREFIX: Final = "Dummy-"
"""First part of the name that `threading` gives to a thread which it has not started."""


class InterruptedExchange(NamedTuple):
    """An exchange of headers that was under way when an exception ended its call.

    Args:
        header: the buffers of the headers.
        work: completes when they have arrived.
        complete: takes part in what follows the headers, given the lengths of their payloads; false if this process
            cannot.
        more: whether the call would have exchanged other headers afterwards.
    """

    header: EagerHeader
    work: Work
    complete: Callable[[Sequence[int]], bool]
    more: bool


class InterruptedCall(NamedTuple):
    """A call that an exception ended while the other processes may have completed it.

    Args:
        text: its operation and the line of the user's code.
        cause: name of the exception.
        owes: how many more headers the other processes wait for before that of the next call.
        broken: whether the other processes wait for data that this process does not send any more.
        exchange: the exchange of its headers, if it was under way.
    """

    text: str
    cause: str
    owes: int = 0
    broken: bool = False
    exchange: InterruptedExchange | None = None


class Turn:
    """Whose turn it is on a transport.

    Args:
        home: the thread in which the run began.
        numbers: number threads without a name. Not for the transport of a group: each of several threads has its own
            group, and starts when it likes.

    Attributes:
        lock: held during a call; calls of other threads wait.
        thread: identifier of the thread whose call is under way; 0 if there is none.
        call: that call; None if there is none.
        interrupted: a call that was interrupted, until the next one was refused on all processes; else None.
        overlapping: names of threads that have called while another thread was in a call.
    """

    __slots__ = (
        "_counts",
        "_names",
        "_numbers",
        "_waited",
        "call",
        "home",
        "interrupted",
        "lock",
        "overlapping",
        "thread",
    )

    def __init__(self, home: threading.Thread, numbers: bool = True) -> None:
        self.home = home
        self._numbers = numbers
        self._counts: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self.lock = threading.RLock()
        self.thread = 0
        self.call: Any = None
        self._waited = False
        self.interrupted: InterruptedCall | None = None
        self.overlapping: set[str] = set()

    def begin(self, call: object) -> None:
        """Wait for the turn of a call of this thread; the caller has checked that it is not inside another one."""
        is_free = self.lock.acquire(blocking=False)
        if not is_free:
            self.lock.acquire()
        self._waited = not is_free
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

    def thread_name(self) -> str:
        """The name of this thread, equal on all processes; empty for the thread in which the run began.

        Called at the beginning of its turn.
        """
        thread = threading.current_thread()
        if thread is self.home or thread.name.startswith(_NATIVE_THREAD_PREFIX):
            return ""
        name = _pool_of_worker(thread.name) or thread.name
        if _NUMBERED_THREAD.match(name):
            name = self._number(name, thread) if self._numbers else _kind_of(name, thread)
        if self._waited:
            self.overlapping.add(name)
        return name

    def _number(self, name: str, thread: threading.Thread) -> str:
        """Replace the number in the name of a thread or pool by one that is equal on all processes.

        Numbers all threads of the kind, those that call later too: the first to call may be another one elsewhere. No
        number is used again: a thread that has ended may be late elsewhere.
        """
        unique, kind = _unique_part(name), _kind_of(name, thread)
        if unique not in self._names:
            # In the order of their start.
            threads = threading.enumerate()
            running = {_unique_part(other.name) for other in threads}
            self._names = {other: number for other, number in self._names.items() if other in running}
            for other in threads:
                if _kind_of(other.name, other) == kind and _unique_part(other.name) not in self._names:
                    self._counts[kind] += 1
                    count = self._counts[kind]
                    self._names[_unique_part(other.name)] = kind if count == 1 else f"{kind} ({count})"
        return self._names[unique]


def _pool_of_worker(name: str) -> str:
    """The name of the pool if this thread, of this name, runs a task of one; else an empty string."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        number = _WORKER_NUMBERS.get(frame.f_globals.get("__name__", ""))
        if number is not None:
            return number.sub("", name)
        frame = frame.f_back
    return ""


def _unique_part(name: str) -> str:
    match = _NUMBERED_THREAD.match(name)
    return match[1] if match else name


def _kind_of(name: str, thread: threading.Thread) -> str:
    """The name without what Python numbers."""
    kind = _NUMBERED_THREAD.sub(lambda match: match[1].partition("-")[0], name)
    return kind if type(thread) is threading.Thread else f"{type(thread).__qualname__} {kind}"


def is_raised_by_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error, for example while this process waited for a backend.

    Python calls a handler with the frame that it interrupts, and no other function gets the frame of its caller. A
    function that has deleted an argument is taken for a handler too.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, frame, trace = trace.tb_frame, trace.tb_next.tb_frame, trace.tb_next
        own = frame.f_locals
        arguments = [own.get(name, interrupted) for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
        for value in (*arguments, *own.values()):
            if value is interrupted or (isinstance(value, tuple) and any(item is interrupted for item in value)):
                return True
    return False
