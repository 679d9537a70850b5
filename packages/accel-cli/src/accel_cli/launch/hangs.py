"""Reports where every process of a launch is if a collective does not finish, from files that the processes write.

The launcher reads the files once a second. If a collective takes longer than a few seconds, it asks the processes for
the current lines of their main threads, so that every report contains them, including a report requested by a signal.

Collectives that torch starts itself, for example in a backward pass, do not write these files. A process is assumed to
wait in one if it has used almost no processor time, and its main thread has stayed in one function of a library.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from accel_cli.launch.report import ending
from accel_state.hang_report.call_log import IMPORT
from accel_state.hang_report.progress import STATUS_FOLDER
from accel_state.hang_report.rank_status import RankStatus, read_statuses, request_stacks
from accel_state.hang_report.report import describe_ranks
from accel_state.proc import process_info, state_of
from accel_state.run_status.folder import announce_run

__all__ = ("HangWatch",)

_STUCK: Final = 5.0
"""Seconds in one collective after which the launcher asks the processes for their position."""

_BUSY: Final = 0.05
"""Share of a processor below which a process counts as waiting; the threads that report its position use about 0.01."""

_SPARE: Final = 0.3
"""Seconds of processor time that a process may use in addition, to report its position."""

_OF_ITS_OWN: Final = frozenset({"__next__", "__iter__", IMPORT})
"""Functions in which a process waits for its own data or imports, not for other processes."""


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
    """

    def __init__(
        self,
        folder: str,
        report_after: float,
        timeout: float | None,
        world_size: int | None = None,
        codes: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._folder = announce_run(folder)
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
    def variables(self) -> dict[str, str]:
        """Variables for the processes."""
        return {STATUS_FOLDER: self._folder}

    @property
    def ended(self) -> str:
        """The message for a run that was ended because it waited for too long."""
        return f"accel launch: The run was ended after {self._timeout:g} s in one collective (hang_timeout)."

    @property
    def held_up_by(self) -> list[int]:
        """Ranks that the others wait for, as last read; empty if all wait, or if it is unknown."""
        waiting = {rank for rank, _ in self._waiting}
        return [rank for rank in range(self._world_size or 0) if waiting and rank not in waiting]

    @property
    def folder(self) -> str:
        """The folder in which the processes write their position."""
        return self._folder

    def look(self) -> bool:
        """Read the positions, print a report if it is due, and return whether the timeout is exceeded."""
        self._seen = read_statuses(self._folder)
        waiting = {(rank, seen.number): seen.since for rank, seen in self._seen.items() if seen.active and seen.since}
        waiting |= self._waiting_in_torch()
        self._waiting = set(waiting)
        if self._hang not in waiting:
            self._hang = min(waiting, key=lambda call: waiting[call], default=None)
            self._next_report, self._text = self._first_report, ""
        self.waited = 0.0 if self._hang is None else max(time.time() - waiting[self._hang], 0.0)
        if self.waited < _STUCK:
            return False
        self._text = self._described()
        request_stacks(self._folder)
        self.over = self._timeout is not None and self.waited >= self._timeout
        if self.over or (self._next_report and self.waited >= self._next_report):
            self.tell()
            while self._next_report and self._next_report <= self.waited:
                self._next_report *= 2
        return self.over

    def _waiting_in_torch(self) -> dict[tuple[int, int], float]:
        """Start times of waits in a library function, by rank and number of the last collective of accel."""
        if self._world_size == 1:
            return {}
        found = {}
        for rank, seen in self._seen.items():
            idle = self._idle.setdefault(rank, _Idle())
            if seen.active or seen.left:
                idle.begin(time.time(), 0.0)
                continue
            since = idle.since(seen)
            if since is not None and time.time() - since >= _STUCK:
                request_stacks(self._folder)
                if idle.waits_in:
                    found[rank, seen.number] = since
        return found

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
        known = range(size) if self._world_size is not None else sorted(self._seen)
        sentences = [describe_ranks(self._seen, size, known=known) + "."]
        sentences += [f"Process {rank} {ending(code)}." for rank, code in sorted(self._codes().items())]
        return "\n  ".join((*sentences, *_in_the_system(self._seen.items())))


class _Idle:
    """The time since which a process has used almost no processor time at one position.

    Attributes:
        waits_in: the library function in which its main thread is; empty if there is none, or if it is unknown.
    """

    def __init__(self) -> None:
        self.waits_in = ""
        self._place = ("", "", 0)
        self._began = self._used = 0.0

    def begin(self, now: float, used: float) -> None:
        """Restart the measurement, because the process has moved on."""
        self._began, self._used, self.waits_in = now, used, ""

    def since(self, seen: RankStatus) -> float | None:
        """Time at which it began to wait, in seconds since 1970; None if its processor time cannot be read."""
        now, used = time.time(), _processor_seconds(seen.pid)
        if used is None:
            return None
        place = (seen.main_thread_at, seen.main_thread_in, seen.number)
        moved = seen.has_stack and self.waits_in != "" and place != self._place
        if not self._began or moved or used - self._used > _SPARE + _BUSY * (now - self._began):
            self.begin(now, used)
        if seen.has_stack:
            self._place = place
            self.waits_in = "" if seen.main_thread_in in _OF_ITS_OWN else seen.main_thread_in
        return self._began


def _processor_seconds(pid: int) -> float | None:
    """Processor time of a process with all its threads; None if the system does not report it."""
    info = process_info(pid)
    return None if info is None else info.processor_seconds


def _in_the_system(seen: Iterable[tuple[int, RankStatus]]) -> list[str]:
    """Sentences about processes that signals do not reach, because they are inside a system call."""
    return [
        f"Process {rank} (pid {status.pid}) is inside a system call, for example to a file system or a driver."
        for rank, status in seen
        if state_of(status.pid) == "uninterruptible"
    ]
