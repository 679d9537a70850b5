"""The text of a hang report: the positions of all ranks in one sentence, and the errors of collectives that contain it.

Does not import torch, because a launcher describes ranks too.
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
from accel_state.proc import State, process_info, state_of
from accel_state.untrusted import printable
from accel_state.watch.calls import Call, format_ranks, frame_of_error
from accel_state.watch.status import RankStatus, World, host_with_namespaces

if TYPE_CHECKING:
    from accel_state.watch.monitor import HangMonitor

__all__ = (
    "MISSED",
    "collective_error",
    "describe_all_ranks",
    "describe_ranks",
    "extend_error",
    "ranks_gone_on",
)

# ---------------------------------------------------------------------- sentences

_SILENT_AFTER_S: Final = 3.0
"""Seconds without a new status after which the report calls a rank silent."""

_MAX_REPORTED_GROUPS: Final = 16
"""Maximum number of positions in one report; beyond it, the report only counts the rest."""

_STATES_WITHOUT_REPLY: Final = frozenset({"ended", "stopped"})


def describe_ranks(
    statuses: Mapping[int, RankStatus],
    world_size: int,
    ages: Mapping[int, float] | None = None,
    ranks: Iterable[int] | None = None,
) -> str:
    """The positions of all ranks; ranks at the same position share a sentence, the smallest group comes first.

    Example: "rank 3 is in gather() at eval.py:88 (call 17); ranks 0-2 are in reduce() at train.py:41 (call 17)".

    Args:
        statuses: statuses by rank; ranks that are missing are unknown.
        world_size: number of processes.
        ages: seconds since the last new status of each rank arrived; by default since it was captured.
        ranks: ranks to describe; by default all of them.
    """
    now = time.monotonic()
    groups: dict[str, list[int]] = {}
    for rank in range(world_size) if ranks is None else ranks:
        status = statuses.get(rank)
        state = "unknown" if status is None else _state(status, now - status.time if ages is None else ages[rank])
        groups.setdefault(state, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    sentences = [
        f"{format_ranks(members)} {'is' if len(members) == 1 else 'are'} {state}" for state, members in ordered
    ]
    more = len(sentences) - _MAX_REPORTED_GROUPS
    # Names of files and functions may contain anything.
    return printable("; ".join(sentences[:_MAX_REPORTED_GROUPS])) + (f"; and {more} other places" if more > 0 else "")


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
    if age > _SILENT_AFTER_S:
        alive = f"alive (process {status.pid}) but " if here != "elsewhere" else ""
        return f"{alive}silent for {age:.0f} s; {last}"
    return status.position()


def _state_here(status: RankStatus) -> State | Literal["elsewhere"]:
    """What the operating system reports about a process, if it is on this machine."""
    if status.host != host_with_namespaces():
        return "elsewhere"
    info = process_info(status.pid)
    if info is not None and status.started not in (0, info.started):
        # Another process has its pid now.
        return "ended"
    return state_of(status.pid) or "elsewhere"


# ---------------------------------------------------------------------- errors

_REPLY_TIMEOUT_S: Final = 3.6
"""Seconds for which to wait until the other ranks publish their positions."""

_POLL_INTERVAL_S: Final = 0.1
"""Seconds between two reads of what they published."""

_SIGNAL_POLL_INTERVAL_S: Final = 0.05
"""Seconds between two checks whether this process received SIGTERM."""

MISSED: Final = "_accel_missed"
"""Attribute of errors with a hang report: the ranks for which this one waited. Launchers record it."""

_HANG_REMEDY: Final = (
    "Look at the processes that are gone or at another position. If one only needs more time, raise the timeout in "
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

    Waits some seconds for the other ranks to publish their positions. If a launcher terminates this process meanwhile,
    the process prints the report before it ends.

    Args:
        error: the error of the backend.
        call: the call that failed.
        rank: index of this process.
        world_size: number of processes.
        monitor: reads the statuses of the others.
        members: ranks of the group of the call; by default all.
    """
    what = printable(call) if call else "a collective"
    with _deferred_termination() as termination:
        where, missed = _everyone(monitor, rank, world_size, termination, members)
        report = CollectiveError(
            f"Cannot complete {what} on rank {rank}.",
            f"{where}\n  The backend reported: {_first_line(error)}",
            _HANG_REMEDY,
        )
        setattr(report, MISSED, missed)
        termination.last_words = f"{report}\n"
    return report


def extend_error(error: BaseException, rank: int, world_size: int, monitor: HangMonitor) -> None:
    """Append the positions of all ranks to an error that the backend raised outside our calls.

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
            error.args = (f"{error}\n  {where}\n  {_HANG_REMEDY}", *error.args[1:])
            setattr(error, MISSED, missed)
            termination.last_words = f"{type(error).__name__}: {error}\n"
    finally:
        monitor.pinned = before


def describe_all_ranks(monitor: HangMonitor, rank: int, world_size: int) -> str:
    """The positions of all ranks in one sentence. Waits some seconds at most, until all ranks have published theirs.

    Args:
        monitor: reads the statuses of the others.
        rank: index of this process.
        world_size: number of processes.
    """
    return _everyone(monitor, rank, world_size, _Termination())[0]


def _everyone(
    monitor: HangMonitor, rank: int, world_size: int, termination: _Termination, members: Sequence[int] = ()
) -> tuple[str, list[int]]:
    """The positions of all ranks, and the members of a group, by default of all ranks, for which this one waited."""
    world = _answers(monitor, world_size, termination)
    where = describe_ranks(world.statuses, world_size, world.ages)
    note = ""
    if not world.store_answers and world_size > 1:
        note = (
            " The process that hosts the store cannot be reached, so this shows the other ranks as they were "
            f"{world.time - world.read:.0f} s ago."
        )
    awaited = members or range(world_size)
    missed = [other for other in awaited if _is_lost(world, other)]
    if not missed:
        mine = _collective_of(world.statuses[rank])
        missed = [other for other in awaited if _collective_of(world.statuses[other]) != mine]
    return f"{where[:1].upper()}{where[1:]}.{note}", missed


def _collective_of(status: RankStatus) -> tuple[int, str, str]:
    """The active collective of a rank, ours or one of another library."""
    return (status.number, status.operation, status.group) if status.active else (0, status.main_thread_in, "")


def _answers(monitor: HangMonitor, world_size: int, termination: _Termination) -> World:
    """The statuses once all ranks have answered or cannot, time is up, or this process has received SIGTERM.

    If the store does not answer, a rank that published just before may be about to end, and this waits for that.
    """
    begun = time.monotonic()
    if monitor.world().store_answers:
        monitor.request_stacks()
    while True:
        world, waited = monitor.world(), time.monotonic() - begun
        answered = len(world.statuses) == world_size and all(_has_answered(world, rank, waited) for rank in world.ages)
        if answered or waited > _REPLY_TIMEOUT_S or termination.wait(_POLL_INTERVAL_S):
            return world


def _has_answered(world: World, rank: int, within: float) -> bool:
    """Whether a rank has captured its stack within these seconds, or is known not to answer."""
    status, age = world.statuses[rank], world.ages[rank]
    return (
        (status.has_stack and age < within)
        or bool(status.left)
        or age > _SILENT_AFTER_S + within
        or _state_here(status) in _STATES_WITHOUT_REPLY
    )


def _is_lost(world: World, rank: int) -> bool:
    """Whether a rank no longer takes part, as far as is known: it is gone, stopped, silent, or was never seen."""
    status = world.statuses.get(rank)
    return (
        status is None
        or bool(status.left)
        or world.ages[rank] > _SILENT_AFTER_S
        or _state_here(status) in _STATES_WITHOUT_REPLY
    )


def ranks_gone_on(world: World, rank: int, before: World) -> list[int]:
    """The ranks that cannot come to where a rank waits for them: they have ended, or wait in a later call.

    A later call is a collective of this library that this rank has not called, a backward pass that synchronises
    gradients, or a collective of torch; and the other rank has not moved between two views.

    Args:
        world: the statuses of all ranks.
        rank: index of the waiting process.
        before: the statuses some seconds earlier, when it already waited.
    """
    own, gone = world.statuses[rank], []
    for other, status in world.statuses.items():
        last = before.statuses.get(other)
        stands = last is not None and last.time < status.time and _counts(last) == _counts(status)
        calls_ours = status.active and not status.group and not own.group and status.number > own.number
        calls_torch = last is not None and all(one.waits_for_others and not one.in_backward for one in (last, status))
        ended = bool(status.left) or _state_here(status) == "ended"
        if other != rank and (ended or (stands and (calls_ours or calls_torch or status.backwards > own.backwards))):
            gone.append(other)
    return gone


def _counts(status: RankStatus) -> tuple[int, int, int]:
    return status.number, status.backwards, status.steps


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


class _Termination:
    """Whether this process has received SIGTERM, and the text that it prints before it ends.

    The signal handler interrupts the waiting thread, so both use a plain value. The handler could wait forever for the
    lock of an event.
    """

    __slots__ = ("last_words", "received")

    def __init__(self) -> None:
        self.received = False
        self.last_words = ""

    def handle(self, number: int, frame: Any) -> None:
        """The handler of the signal."""
        self.received = True

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds`, or until the process receives SIGTERM; return whether it did."""
        deadline = time.monotonic() + seconds
        while not self.received and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _SIGNAL_POLL_INTERVAL_S))
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
