"""The text of a hang report: where all ranks are, in a sentence, and the errors of collectives that say it.

Loads no torch: a launcher describes ranks too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from accel_state.errors import CollectiveError
from accel_state.hang_report.call_log import Call, format_ranks, frame_of_error
from accel_state.hang_report.rank_status import RankStatus, host_with_namespaces
from accel_state.proc import State, state_of

if TYPE_CHECKING:
    from accel_state.hang_report.monitor import HangMonitor, WorldSnapshot

__all__ = (
    "MISSED",
    "collective_error",
    "describe_all_ranks",
    "describe_ranks",
    "extend_error",
)

# ---------------------------------------------------------------------- sentences

_SILENT: Final = 3.0
"""Seconds without news of a rank after which the report no longer says that it is where it was seen."""

_MOST_GROUPS: Final = 16
"""Sentences in one report; with thousands of processes in different places the report only counts the rest."""

_HELPLESS: Final = frozenset({"ended", "stopped"})


def describe_ranks(
    statuses: Mapping[int, RankStatus],
    world_size: int,
    ages: Mapping[int, float] | None = None,
    known: Iterable[int] | None = None,
) -> str:
    """Where all ranks are, those in the same place in one sentence, the smallest group first.

    Example: "rank 3 is in gather() at eval.py:88 (call 17); ranks 0-2 are in reduce() at train.py:41 (call 17)".

    Args:
        statuses: by rank; ranks that are missing are unknown.
        world_size: number of processes.
        ages: seconds since a new status of each of them arrived; by default since it was captured.
        known: ranks to describe; by default all of them.
    """
    now = time.time()
    groups: dict[str, list[int]] = {}
    for rank in range(world_size) if known is None else known:
        status = statuses.get(rank)
        state = "unknown" if status is None else _state(status, now - status.time if ages is None else ages[rank])
        groups.setdefault(state, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    sentences = [
        f"{format_ranks(members)} {'is' if len(members) == 1 else 'are'} {state}" for state, members in ordered
    ]
    more = len(sentences) - _MOST_GROUPS
    return "; ".join(sentences[:_MOST_GROUPS]) + (f"; and {more} other places" if more > 0 else "")


def _state(status: RankStatus, age: float) -> str:
    if status.left:
        call = f", after {status.collective()}" if status.number else ""
        return f"no longer there: it has left the run {status.left}{call}"
    here = _state_here(status)
    last = f"it was last seen {status.position()}"
    if here == "ended":
        return f"gone (process {status.pid} has ended); {last}"
    if here == "stopped":
        return f"stopped (process {status.pid}, by SIGSTOP or a debugger); {last}"
    if age > _SILENT:
        alive = f"alive (process {status.pid}) but " if here != "elsewhere" else ""
        return f"{alive}silent for {age:.0f} s; {last}"
    return status.position()


def _state_here(status: RankStatus) -> State | Literal["elsewhere"]:
    """What the operating system says of a process, where it is one of this machine."""
    if status.host != host_with_namespaces():
        return "elsewhere"
    return state_of(status.pid) or "elsewhere"


# ---------------------------------------------------------------------- errors

_LONGEST_WAIT: Final = 3.6
"""Seconds that the other ranks are given to publish where they are."""

_POLL: Final = 0.1
"""Seconds between two reads of what they published."""

_SIGNAL_POLL: Final = 0.05
"""Seconds between two checks whether this process received SIGTERM."""

MISSED: Final = "_accel_missed"
"""Attribute of errors that say where every rank was: the ranks that this one waited for. Launchers record it."""

_REMEDY: Final = (
    "Look at the processes that are gone or elsewhere. If one only needs longer, raise the timeout in "
    "InitProcessGroupKwargs."
)


def collective_error(
    error: BaseException,
    call: Call | None,
    rank: int,
    world_size: int,
    monitor: HangMonitor,
    members: Sequence[int] = (),
) -> CollectiveError:
    """The error for a collective that the backend could not complete.

    Gives the other ranks some seconds to publish where they are. A launcher may terminate this process meanwhile; then
    it prints the report before it ends.

    Args:
        error: what the backend raised.
        call: the call that failed.
        rank: index of this process.
        world_size: number of processes.
        monitor: reads the statuses of the others.
        members: ranks of the group that the call is of; by default all.
    """
    what = str(call) if call else "a collective"
    with _deferred_termination() as termination:
        where, missed = _everyone(monitor, rank, world_size, termination, members)
        report = CollectiveError(
            f"Cannot complete {what} on rank {rank}.",
            f"{where}\n  The backend said: {_first_line(error)}",
            _REMEDY,
        )
        setattr(report, MISSED, missed)
        termination.last_words = f"{report}\n"
    return report


def extend_error(error: BaseException, rank: int, world_size: int, monitor: HangMonitor) -> None:
    """Append where every rank was to an error that the backend raised outside of our calls.

    Args:
        error: its message is extended.
        rank: index of this process.
        world_size: number of processes.
        monitor: reads the statuses of the others.
    """
    if hasattr(error, MISSED):
        return
    before, monitor.pinned = monitor.pinned, frame_of_error(error)
    try:
        with _deferred_termination() as termination:
            where, missed = _everyone(monitor, rank, world_size, termination)
            error.args = (f"{error}\n  {where}\n  {_REMEDY}", *error.args[1:])
            setattr(error, MISSED, missed)
            termination.last_words = f"{type(error).__name__}: {error}\n"
    finally:
        monitor.pinned = before


def describe_all_ranks(monitor: HangMonitor, rank: int, world_size: int) -> str:
    """Where all ranks are, in a sentence, once they have published it or cannot; within some seconds.

    Args:
        monitor: reads the statuses of the others.
        rank: index of this process.
        world_size: number of processes.
    """
    return _everyone(monitor, rank, world_size, _Termination())[0]


def _everyone(
    monitor: HangMonitor, rank: int, world_size: int, termination: _Termination, members: Sequence[int] = ()
) -> tuple[str, list[int]]:
    """Where all ranks are, and which of the members of a group, by default of all ranks, this one waited for."""
    snapshot = _answers(monitor, world_size, termination)
    where = describe_ranks(snapshot.statuses, world_size, snapshot.ages)
    note = ""
    if snapshot.store_failed is not None and world_size > 1:
        note = (
            " The process that hosts the store cannot be reached, so this shows the other ranks as they were "
            f"{time.monotonic() - snapshot.taken:.0f} s ago."
        )
    asked = set(members or range(world_size))
    missed = [other for other in _lost_ranks(snapshot.statuses, world_size, snapshot.ages) if other in asked]
    if not missed:
        mine = _collective_of(snapshot.statuses[rank])
        missed = [other for other in snapshot.statuses if _collective_of(snapshot.statuses[other]) != mine]
        missed = [other for other in missed if other in asked]
    return f"{where[:1].upper()}{where[1:]}.{note}", missed


def _collective_of(status: RankStatus) -> tuple[int, str, str]:
    """The collective that a rank is in, of ours or of another library."""
    return (status.number, status.operation, status.group) if status.active else (0, status.main_thread_in, "")


def _answers(monitor: HangMonitor, world_size: int, termination: _Termination) -> WorldSnapshot:
    """The statuses once all ranks have answered or cannot, time is up, or this process received SIGTERM.

    Where the store does not answer, a rank that published just before may be about to end, and gets the time to.
    """
    begun = time.monotonic()
    if monitor.snapshot().store_failed is None:
        monitor.request_stacks()
    while True:
        snapshot, waited = monitor.snapshot(), time.monotonic() - begun
        answered = _all_answered(snapshot.statuses, world_size, snapshot.ages, waited)
        if answered or waited > _LONGEST_WAIT or termination.wait(_POLL):
            return snapshot


def _all_answered(
    statuses: Mapping[int, RankStatus], world_size: int, ages: Mapping[int, float], within: float
) -> bool:
    """Whether each rank has captured its stack within so many seconds, or is known not to answer."""
    return len(statuses) == world_size and all(
        (status.has_stack and ages[rank] < within)
        or status.left
        or ages[rank] > _SILENT + within
        or _state_here(status) in _HELPLESS
        for rank, status in statuses.items()
    )


def _lost_ranks(statuses: Mapping[int, RankStatus], world_size: int, ages: Mapping[int, float]) -> list[int]:
    """Ranks that take no part any more, as far as is known: gone, stopped, silent, or never seen."""
    return [
        rank
        for rank in range(world_size)
        if (status := statuses.get(rank)) is None
        or status.left
        or ages[rank] > _SILENT
        or _state_here(status) in _HELPLESS
    ]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


class _Termination:
    """Whether this process received SIGTERM, and what it prints before it ends.

    The signal's handler interrupts the thread that waits, so both use a plain value: an event has a lock, for which
    the handler could wait for ever.
    """

    __slots__ = ("last_words", "received")

    def __init__(self) -> None:
        self.received = False
        self.last_words = ""

    def handle(self, number: int, frame: Any) -> None:
        """The handler of the signal."""
        self.received = True

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until the process receives SIGTERM; whether it did."""
        deadline = time.monotonic() + seconds
        while not self.received and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _SIGNAL_POLL))
        return self.received


@contextmanager
def _deferred_termination() -> Iterator[_Termination]:
    """Defer SIGTERM to the end of the block; a handler that the script installed stays in place."""
    termination = _Termination()
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        yield termination
        return
    signal.signal(signal.SIGTERM, termination.handle)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if termination.received:
            sys.stderr.write(termination.last_words)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)
