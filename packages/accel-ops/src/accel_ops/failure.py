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

from accel_ops.call_log import Call
from accel_ops.sightings import all_told, describe
from accel_ops.watch import TICK, Picture, Watch
from accel_state.errors import CollectiveError

__all__ = ("explain",)

_LONGEST_WAIT: Final = 8.0
"""Seconds that the others, on a machine that is busy, are given to say where they are."""

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
    watch.ask()
    with _termination_put_off() as ended:
        report = _report(error, call, rank, world_size, _answers(watch, world_size, ended))
        if ended.is_set():
            sys.stderr.write(f"{report}\n")
            sys.stderr.flush()
    return report


def _answers(watch: Watch, world_size: int, ended: threading.Event) -> Picture:
    """Where all are, once they have said so or cannot; at the latest when time is up or this process is ended."""
    deadline = time.monotonic() + _LONGEST_WAIT
    ended.wait(TICK)
    while True:
        hurried = ended.wait(TICK / 2)
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


@contextmanager
def _termination_put_off() -> Iterator[threading.Event]:
    """Set the event instead of ending on SIGTERM, and end when the block is left.

    A handler that the script installed is left in place.
    """
    asked = threading.Event()
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        asked.set()

    signal.signal(signal.SIGTERM, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if asked.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
