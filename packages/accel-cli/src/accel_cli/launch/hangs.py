"""Reports where every process of a launch is if a collective does not finish, from the records of the processes.

The launcher reads the records once a second. If a collective takes longer than a few seconds, it asks the processes for
the current lines of their main threads, so that every report contains them, including a report requested by a signal.

The records do not have collectives that torch starts itself, for example in a backward pass. A process waits in one if
its main thread stays in such a function of torch, or torch's flight recorder has a collective that does not end, and
neither the process nor its children use a processor. A process
that waits anywhere else, such as for a compiler or a queue, may be healthy, and is never reported or ended. All times
are of the monotonic clock, because the wall clock may step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from accel_cli.launch.failures import ending
from accel_state.proc import processor_seconds, state_of
from accel_state.watch.report import describe_ranks
from accel_state.watch.runs import announce_run
from accel_state.watch.status import RankStatus, read_statuses, request_stacks

__all__ = ("HangWatch",)

_STUCK_AFTER_S: Final = 5.0
"""Seconds in one collective after which the launcher asks the processes for their position."""

_CANNOT_END_AFTER_S: Final = 2.0
"""Seconds in one collective of all processes after which it cannot end without a process that has ended."""

_BUSY_SHARE: Final = 0.05
"""Share of a processor below which a process counts as waiting; the threads that report its position use about 0.01."""

_SPARE_CPU_S: Final = 0.3
"""Seconds of processor time that a process may use in addition, to report its position."""


class HangWatch:
    """Watches the processes of one machine.

    Args:
        folder: a folder of the launch, in which the processes write their position.
        report_after: seconds in a collective until the first report, twice as long until each next one; 0 for no
            reports.
        timeout: seconds in a collective after which the run is ended, or None.
        world_size: number of all processes; None to report only the processes that have written, as with several
            machines.
        codes: returns the exit codes of the processes that have ended, by rank.

    Attributes:
        folder: the folder in which the processes write their position.
    """

    def __init__(
        self,
        folder: str,
        report_after: float,
        timeout: float | None,
        world_size: int | None = None,
        codes: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self.folder = announce_run(folder)
        self._world_size = world_size
        self._first_report = report_after
        self._next_report = report_after
        self._timeout = timeout
        self._codes = codes
        self._seen: Mapping[int, RankStatus] = {}
        self._text = ""
        self._hang: tuple[int, int] | None = None
        self._idle: dict[int, _Idle] = {}
        self._waiting: set[tuple[int, int]] = set()
        self.waited = 0.0
        """Seconds since the oldest pending collective began; 0 if no process waits."""
        self.over = False
        """Whether the run has waited longer than the timeout."""

    @property
    def ended(self) -> str:
        """The message for a run that was ended because it waited for too long."""
        return f"accel launch: The run was ended after {self._timeout:g} s in one collective (hang_timeout)."

    @property
    def held_up_by(self) -> list[int]:
        """Ranks that the others wait for, as last read; empty if all wait, or if it is unknown."""
        waiting = {rank for rank, _ in self._waiting}
        return [rank for rank in range(self._world_size or 0) if waiting and rank not in waiting]

    def look(self) -> bool:
        """Read the positions, print a report if it is due, and return whether the timeout is exceeded."""
        self._seen, now = read_statuses(self.folder), time.monotonic()
        waiting = {(rank, seen.number): seen.since for rank, seen in self._seen.items() if seen.active and seen.since}
        if self._world_size != 1:
            waiting |= self._waiting_in_torch(now)
        self._waiting = set(waiting)
        if self._hang not in waiting:
            self._hang = min(waiting, key=lambda call: waiting[call], default=None)
            self._next_report, self._text = self._first_report, ""
        self.waited = 0.0 if self._hang is None else max(now - waiting[self._hang], 0.0)
        if self.waited < _STUCK_AFTER_S:
            return False
        self._text = self._described()
        request_stacks(self.folder)
        self.over = self._timeout is not None and self.waited >= self._timeout
        if self.over or (self._next_report and self.waited >= self._next_report):
            self.tell()
            while self._next_report and self._next_report <= self.waited:
                self._next_report *= 2
        return self.over

    def _waiting_in_torch(self, now: float) -> dict[tuple[int, int], float]:
        """When waits in collectives of torch began, by rank and number of the last collective of accel."""
        waiting = {}
        for rank, seen in self._seen.items():
            if seen.active or seen.left:
                self._idle.pop(rank, None)
                continue
            idle = self._idle.setdefault(rank, _Idle())
            since = idle.since(seen, now)
            if now - since >= _STUCK_AFTER_S:
                request_stacks(self.folder)
                if idle.waits_for_others:
                    waiting[rank, seen.number] = since
        return waiting

    def ended_early(self, codes: Mapping[int, int]) -> list[int]:
        """Ranks that ended with exit code 0 while every other rank waits for all processes; empty if nobody knows.

        Args:
            codes: exit codes of the processes that have ended, by rank.
        """
        now, waiting = time.monotonic(), set(range(self._world_size or 0)) - set(codes)
        if not codes or not waiting or any(codes.values()):
            return []
        begun = [_begin_of_wait(self._seen.get(rank)) for rank in waiting]
        return sorted(codes) if all(since and now - since >= _CANNOT_END_AFTER_S for since in begun) else []

    def tell(self) -> None:
        """Print where the processes are, if they wait."""
        if self._text:
            print(
                f"accel launch: Processes have waited in a collective for {self.waited:.0f} s.\n  {self._text}",
                file=sys.stderr,
                flush=True,
            )

    def _described(self) -> str:
        size = self._world_size if self._world_size is not None else max(self._seen, default=-1) + 1
        ranks = range(size) if self._world_size is not None else sorted(self._seen)
        sentences = [describe_ranks(self._seen, size, ranks=ranks) + "."]
        sentences += [f"Process {rank} {ending(code)}." for rank, code in sorted(self._codes().items())]
        return "\n  ".join((*sentences, *_in_the_system(self._seen.items())))


def _begin_of_wait(seen: RankStatus | None) -> float:
    """When a process began to wait for all other processes; 0 if it does not, or that is unknown."""
    if seen is None:
        return 0.0
    in_collective = seen.since if seen.active and not seen.group else 0.0
    return in_collective or (seen.state_since if seen.state == "waiting for others" else 0.0)


class _Idle:
    """The time since which a process and its children have used almost no processor time at one position.

    Attributes:
        waits_for_others: whether it certainly waits for other processes there.
    """

    def __init__(self) -> None:
        self.waits_for_others = False
        self._progress: tuple[int, int] | None = None
        self._place: tuple[str, str, str] | None = None
        self._used: float | None = None
        self._began = 0.0

    def since(self, seen: RankStatus, now: float) -> float:
        """Time at which it began to wait, by the monotonic clock; now if it does not, or nobody knows."""
        progress, place = (seen.number, seen.steps), (seen.main_thread_at, seen.main_thread_in, seen.pending)
        # Reading the processor time of many threads takes long, and is not necessary for a process that makes steps.
        used = processor_seconds(seen.pid) if progress == self._progress else None
        moved = seen.has_stack and self._place not in (None, place)
        if (
            used is None
            or self._used is None
            or moved
            or used - self._used > _SPARE_CPU_S + _BUSY_SHARE * (now - self._began)
        ):
            self._began, self._used, self._progress = now, used, progress
            self._place, self.waits_for_others = None, False
        if seen.has_stack:
            self._place, self.waits_for_others = place, seen.waits_for_others
        return self._began


def _in_the_system(seen: Iterable[tuple[int, RankStatus]]) -> list[str]:
    """Sentences about processes that signals do not reach, because they are inside a system call."""
    return [
        f"Process {rank} (pid {status.pid}) is inside a system call, for example to a file system or a driver."
        for rank, status in seen
        if state_of(status.pid) == "uninterruptible"
    ]
