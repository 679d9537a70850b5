"""Turning the failure of a backend into an error that says where every process is."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from accel_state.errors import CollectiveError
from accel_state.hang_report.call_log import Call
from accel_state.hang_report.sightings import all_told, describe
from accel_state.hang_report.watch import TICK, Picture, Watch

__all__ = ("explain",)

_LONGEST_WAIT: Final = 8.0
"""Seconds that the others, on a machine that is busy, are given to say where they are."""

_GLANCE: Final = 0.05
"""Seconds between two looks whether this process was asked to end."""

_REMEDY: Final = (
    "Look at the processes that are gone or elsewhere. If one only needs longer, raise the timeout in "
    "InitProcessGroupKwargs."
)


def explain(error: BaseException, call: Call | None, rank: int, world_size: int, watch: Watch) -> CollectiveError:
    """The error for a collective that the backend could not complete.

    Waits until the other processes have published where they are now. A launcher may end this process meanwhile; then
    the report is printed first.

    Args:
        error: what the backend raised.
        call: the call that failed.
        rank: index of this process.
        world_size: number of processes.
        watch: what reads where the others are.
    """
    with _termination_put_off() as end:
        watch.ask()
        report = _report(error, call, rank, world_size, _answers(watch, world_size, end))
        end.last_words = f"{report}\n"
    return report


def _answers(watch: Watch, world_size: int, end: _End) -> Picture:
    """Where all are, once they have said so or cannot; at the latest when time is up or this process is ended."""
    deadline = time.monotonic() + _LONGEST_WAIT
    end.wait(TICK)
    while True:
        # What they answered is overwritten by what they publish a tick later, which may be before it is read.
        watch.ask()
        hurried = end.wait(TICK / 2)
        picture = watch.picture()
        if hurried or not picture.fresh or all_told(picture.sightings, world_size) or time.monotonic() > deadline:
            return picture


def _report(error: BaseException, call: Call | None, rank: int, world_size: int, picture: Picture) -> CollectiveError:
    what = f"{call.operation}() at {call.location} (call {call.number})" if call else "A collective"
    source = ""
    if not picture.fresh and world_size > 1:
        age = time.monotonic() - picture.taken
        source = f" (The process that hosts the store cannot be reached; the others as they were {age:.1f} s ago.)"
    where = describe(picture.sightings, world_size)
    return CollectiveError(
        f"{what} on rank {rank} could not be completed.",
        f"{where[:1].upper()}{where[1:]}.{source}\n  The backend said: {_first_line(error)}",
        _REMEDY,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


class _End:
    """Whether this process was asked to end, and what it prints before it does.

    The signal's handler interrupts the thread that waits, so both use a plain value: an event has a lock, for which
    the handler could wait without end.
    """

    __slots__ = ("asked", "last_words")

    def __init__(self) -> None:
        self.asked = False
        self.last_words = ""

    def note(self, number: int, frame: Any) -> None:
        """The handler of the signal."""
        self.asked = True

    def wait(self, seconds: float) -> bool:
        """Wait so long, but no longer than until the process is asked to end; whether it was."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE))
        return self.asked


@contextmanager
def _termination_put_off() -> Iterator[_End]:
    """Take note of SIGTERM instead of ending, and end when the block is left.

    A handler that the script installed is left in place.
    """
    end = _End()
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield end
        return
    signal.signal(signal.SIGTERM, end.note)
    try:
        yield end
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if end.asked:
            sys.stderr.write(end.last_words)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)
