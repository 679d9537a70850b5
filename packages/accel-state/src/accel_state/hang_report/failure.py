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
from accel_state.hang_report.main_thread import place_of
from accel_state.hang_report.sightings import Sighting, absent, all_told, describe
from accel_state.hang_report.watch import TICK, Picture, Watch

__all__ = ("MISSED", "amend", "everyone", "explain")

_LONGEST_WAIT: Final = 3.6
"""Seconds that the others are given to say where they are."""

_GLANCE: Final = 0.05
"""Seconds between two looks whether this process was asked to end."""

MISSED: Final = "_accel_missed"
"""Attribute of errors that say where every process was: the ranks that this one waited for. Launchers record it."""

_REMEDY: Final = (
    "Look at the processes that are gone or elsewhere. If one only needs longer, raise the timeout in "
    "InitProcessGroupKwargs."
)


def explain(error: BaseException, call: Call | None, rank: int, world_size: int, watch: Watch) -> CollectiveError:
    """The error for a collective that the backend could not complete.

    Gives the other processes some seconds to publish where they are. A launcher may end this process meanwhile; then
    the report is printed first.

    Args:
        error: what the backend raised.
        call: the call that failed.
        rank: index of this process.
        world_size: number of processes.
        watch: what reads where the others are.
    """
    what = f"{call.operation}() at {call.location} (call {call.number})" if call else "A collective"
    with _termination_put_off() as end:
        where, missed = _everyone(watch, rank, world_size, end)
        report = CollectiveError(
            f"{what} on rank {rank} could not be completed.",
            f"{where}\n  The backend said: {_first_line(error)}",
            _REMEDY,
        )
        setattr(report, MISSED, missed)
        end.last_words = f"{report}\n"
    return report


def amend(error: BaseException, rank: int, world_size: int, watch: Watch) -> None:
    """Say at the end of an error that the backend raised, outside of our calls, where every process was.

    Args:
        error: its message is extended.
        rank: index of this process.
        world_size: number of processes.
        watch: what reads where the others are.
    """
    if hasattr(error, MISSED):
        return
    before, watch.pinned = watch.pinned, place_of(error)
    try:
        with _termination_put_off() as end:
            where, missed = _everyone(watch, rank, world_size, end)
            error.args = (f"{error}\n  {where}\n  {_REMEDY}", *error.args[1:])
            setattr(error, MISSED, missed)
            end.last_words = f"{type(error).__name__}: {error}\n"
    finally:
        watch.pinned = before


def everyone(watch: Watch, rank: int, world_size: int) -> str:
    """Where all processes are, in a sentence, once they have said so or cannot; within some seconds.

    Args:
        watch: what reads where the others are.
        rank: index of this process.
        world_size: number of processes.
    """
    return _everyone(watch, rank, world_size, End())[0]


def _everyone(watch: Watch, rank: int, world_size: int, end: End) -> tuple[str, list[int]]:
    """Where all processes are, and which of them this one waited for."""
    picture = _answers(watch, world_size, end)
    where = describe(picture.sightings, world_size, picture.ages)
    source = ""
    if picture.store_failed is not None and world_size > 1:
        source = (
            " The process that hosts the store cannot be reached, so the others are told as they were "
            f"{time.monotonic() - picture.taken:.0f} s ago."
        )
    missed = absent(picture.sightings, world_size, picture.ages)
    if not missed:
        mine = _call(picture.sightings[rank])
        missed = [other for other, seen in picture.sightings.items() if _call(seen) != mine]
    return f"{where[:1].upper()}{where[1:]}.{source}", missed


def _call(seen: Sighting) -> tuple[int, str]:
    """The collective that a process is in, of ours or of another library."""
    return (seen.number, seen.operation) if seen.active else (0, seen.now_in)


def _answers(watch: Watch, world_size: int, end: End) -> Picture:
    """What is known when all have answered or cannot, time is up, or this process is ended.

    Where the store does not answer, one that was heard of just before may be about to end: it is given the time.
    """
    begun = time.monotonic()
    if watch.picture().store_failed is None:
        watch.ask()
    while True:
        picture, waited = watch.picture(), time.monotonic() - begun
        told = all_told(picture.sightings, world_size, picture.ages, waited)
        if told or waited > _LONGEST_WAIT or end.wait(TICK / 5):
            return picture


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


class End:
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
def _termination_put_off() -> Iterator[End]:
    """Take note of SIGTERM instead of ending, and end when the block is left.

    A handler that the script installed is left in place.
    """
    end = End()
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
