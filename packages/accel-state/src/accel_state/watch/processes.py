"""What every process of a run does, from its own status, the operating system, and its stack.

    for process in inspect_run(find_run("4711")).processes:
        print(process.rank, process.state, process.at)

The hang monitor of a process that trains writes its position within a second. A process that does not answer is
inspected from outside: the system reports whether it exists, is stopped, or is blocked in a system call, and its stack
shows whether it still imports. Therefore nothing here waits for a process or for the store of the run.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from accel_state.proc import ProcessInfo, environment_of, process_info, state_of
from accel_state.watch.calls import IMPORT, UserFrame
from accel_state.watch.record import STATUS_FOLDER
from accel_state.watch.runs import LaunchedRun
from accel_state.watch.stacks import SUFFIX, signalled_stacks, user_frame_in
from accel_state.watch.status import (
    EXITED_NORMALLY,
    IN_COLLECTIVE,
    RankStatus,
    World,
    read_statuses,
    read_world,
    request_stacks,
    request_world,
)

__all__ = ("ProcessStatus", "RunStatus", "inspect_run")

_SILENT_AFTER_S: Final = 3.0
"""Seconds without a new status after which a process is silent; it writes twice a second."""

_LOCAL_REPLY_TIMEOUT_S: Final = 2.0
"""Seconds for which to wait until processes of this machine have captured their main threads."""

_REMOTE_REPLY_TIMEOUT_S: Final = 3.5
"""The same for processes of other machines, which answer through the store."""

_POLL_INTERVAL_S: Final = 0.05
_WAITS_AFTER_S: Final = 2.0
"""Seconds in a collective after which the ranks that are not in it count as holding it up."""

_STACK_FILE: Final = re.compile(rf"rank(\d{{1,7}})\.(\d{{1,10}}){re.escape(SUFFIX)}")
_WAITING: Final = "waiting for others"


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a run.

    Args:
        rank: its rank.
        host: name of its machine; empty if it never published a status.
        pid: its process id there; 0 if it never published a status.
        state: "importing", "waiting for others" (to begin), "in collective", "in step", "saving", "loading", "in file
            IO", "running" (before the first step), "silent" (it exists and does not answer), "stopped", "finished",
            "dead" or "unknown" (on another machine, and it never published a status).
        operation: the current collective or library function; or empty.
        at: line of the user's code where it is, or was last; for a collective the line that called it. Empty if
            unknown.
        seconds: for how long it has been in this state, or in this step; None if unknown.
        steps: number of steps of its optimizer.
        steps_per_second: recent steps per second; None if unknown.
        memory: bytes of host memory that it uses; None if unknown.
        device_memory: bytes that its tensors use on its device; None if the device does not count them.
        call: number of its last collective; 0 if it has called none.
        bad_step: the last step that a guard found bad, as text; empty if there was none.
        stack: the stacks of its threads, if they were requested.
    """

    rank: int
    host: str
    pid: int
    state: str
    operation: str = ""
    at: str = ""
    seconds: float | None = None
    steps: int = 0
    steps_per_second: float | None = None
    memory: int | None = None
    device_memory: int | None = None
    call: int = 0
    bad_step: str = ""
    stack: str = ""


class RunStatus(NamedTuple):
    """A run at one moment.

    Args:
        run: the run.
        world_size: number of its processes, on all machines.
        processes: the known processes, by rank.
        held_up_by: ranks that are not in the collective in which others wait.
        store_answers: whether the store answered, for the processes of other machines; None if there are none.
    """

    run: LaunchedRun
    world_size: int
    processes: tuple[ProcessStatus, ...]
    held_up_by: tuple[int, ...]
    store_answers: bool | None


class _Process(NamedTuple):
    """A process of this machine."""

    pid: int
    info: ProcessInfo | None
    stack_file: str

    @property
    def exists(self) -> bool:
        return self.info.state != "ended" if self.info is not None else state_of(self.pid) != "ended"

    @property
    def runs(self) -> bool:
        return self.exists and (self.info is None or self.info.state != "stopped")

    @property
    def is_blocked(self) -> bool:
        """Whether it is in a system call that no signal ends, such as one that waits for a disk."""
        return self.info is not None and self.info.state == "uninterruptible"


def inspect_run(run: LaunchedRun, stacks: bool = False) -> RunStatus:
    """What every process of a run does now; takes at most five seconds, whatever the processes do.

    Args:
        run: the run.
        stacks: add the Python stacks of the processes of this machine.
    """
    begun, folder = time.monotonic(), run.status_folder
    request_stacks(folder)
    processes = _processes(folder)
    size = _world_size(processes)
    world = _wait_for_answers(folder, processes, size, begun)
    processes = _processes(folder)
    own = _own_statuses(folder, processes)
    silent = [rank for rank in processes if rank not in own or not _has_answered(own[rank], own[rank].time, begun)]
    inspected = [one for rank, one in processes.items() if one.runs and (stacks or rank in silent)]
    written = signalled_stacks({one.pid: one.stack_file for one in inspected})
    statuses = []
    for rank in range(size):
        process = processes.get(rank)
        if process is not None:
            stack = written.get(process.pid, "")
            status = _status_of(rank, own.get(rank), _age(own.get(rank)), process, user_frame_in(stack, run))
            statuses.append(replace(status, stack=stack) if stacks else status)
        else:
            seen = None if world is None else world.statuses.get(rank)
            statuses.append(_status_of(rank, seen, world.ages[rank] if world is not None and seen is not None else 0.0))
    answers = (world is not None and world.store_answers) if size > len(processes) else None
    return RunStatus(run, size, tuple(statuses), _held_up_by(statuses), answers)


def _age(own: RankStatus | None) -> float:
    return 0.0 if own is None else time.monotonic() - own.time


def _processes(folder: str) -> dict[int, _Process]:
    """The processes of this machine by rank; if a rank was restarted, its last process."""
    newest: dict[int, tuple[bool, float, _Process]] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        # The run has ended meanwhile.
        return {}
    for match in filter(None, map(_STACK_FILE.fullmatch, names)):
        rank, pid, path = int(match[1]), int(match[2]), os.path.join(folder, match[0])
        info = process_info(pid)
        if info is not None and info.state != "ended" and environment_of(pid).get(STATUS_FOLDER) != folder:
            # Another process now has this pid.
            info = info._replace(state="ended")
        process = _Process(pid, info, path)
        order = (process.exists, _modified(path), process)
        if rank not in newest or order[:2] > newest[rank][:2]:
            newest[rank] = order
    return {rank: process for rank, (_, _, process) in newest.items()}


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _own_statuses(folder: str, processes: Mapping[int, _Process]) -> dict[int, RankStatus]:
    """The statuses that the processes wrote; not those of earlier processes of the same ranks."""
    statuses = read_statuses(folder).items()
    return {rank: one for rank, one in statuses if rank in processes and processes[rank].pid == one.pid}


def _world_size(processes: Mapping[int, _Process]) -> int:
    texts = (environment_of(one.pid).get("WORLD_SIZE", "") for one in processes.values() if one.exists)
    size = next((int(text) for text in texts if text.isdecimal()), 0)
    return max(size, max(processes, default=-1) + 1)


def _is_reporting(own: RankStatus) -> bool:
    """Whether the monitor of a process is running."""
    return own.state != _WAITING and time.monotonic() - own.time < _SILENT_AFTER_S


def _has_answered(status: RankStatus, moment: float, begun: float) -> bool:
    """Whether a status of this moment answers a request, or its process answers none."""
    return bool(status.left) or status.state == _WAITING or (status.has_stack and moment >= begun)


def _wait_for_answers(folder: str, processes: Mapping[int, _Process], size: int, begun: float) -> World | None:
    """Wait for new statuses of the reporting processes, and for those of other machines, which one of them writes."""
    own = _own_statuses(folder, processes)
    reporting = [rank for rank, one in own.items() if processes[rank].runs and _is_reporting(one)]
    elsewhere = size > len(processes) and bool(reporting)
    if elsewhere:
        request_world(folder, min(reporting))
    while True:
        waited, own = time.monotonic() - begun, _own_statuses(folder, processes)
        here = all(_has_answered(own[rank], own[rank].time, begun) for rank in reporting if rank in own)
        world = read_world(folder) if elsewhere else None
        world = None if world is None or world.time < begun else world
        there = not elsewhere or (world is not None and _all_answered(world, begun))
        if (here or waited >= _LOCAL_REPLY_TIMEOUT_S) and (there or waited >= _REMOTE_REPLY_TIMEOUT_S):
            return world
        time.sleep(_POLL_INTERVAL_S)


def _all_answered(world: World, begun: float) -> bool:
    return not world.store_answers or all(
        world.ages[rank] > _SILENT_AFTER_S or _has_answered(status, world.time - world.ages[rank], begun)
        for rank, status in world.statuses.items()
    )


def _status_of(
    rank: int,
    own: RankStatus | None,
    age: float,
    process: _Process | None = None,
    frame: UserFrame | None = None,
) -> ProcessStatus:
    """One process.

    Args:
        rank: its rank.
        own: the status that it published last, or None.
        age: seconds since then.
        process: what the system of this machine reports about it; None on another machine.
        frame: where its main thread is, if it was inspected from outside.
    """
    if own is not None:
        status = _published(rank, own, age)
    elif process is not None:
        status = ProcessStatus(rank, socket.gethostname(), process.pid, "running")
    else:
        return ProcessStatus(rank, "", 0, "unknown")
    if frame is not None and status.state in ("running", "in step"):
        status = replace(status, operation=frame.inside, at=str(frame.location))
    if status.state == "running" and status.operation == IMPORT:
        status = replace(status, state="importing", operation="")
    if process is not None and process.exists and process.info is not None:
        status = replace(status, memory=process.info.memory)
    if process is not None and not process.exists:
        finished = own is not None and own.left == EXITED_NORMALLY
        return replace(status, state="finished" if finished else "dead", operation="", seconds=None)
    if process is not None and not process.runs:
        return replace(status, state="stopped", seconds=None)
    if process is not None and process.is_blocked and status.state in ("running", "in step"):
        return replace(status, state="in file IO", operation="", seconds=None)
    if own is not None and not own.left and own.state != _WAITING and age > _SILENT_AFTER_S:
        return replace(status, state="silent", seconds=age)
    return status


def _published(rank: int, own: RankStatus, age: float) -> ProcessStatus:
    """A process according to its own status, which is so many seconds old."""
    state = "finished" if own.left == EXITED_NORMALLY else "dead" if own.left else own.state
    operation = own.operation if state == IN_COLLECTIVE else "" if own.at or own.left else own.main_thread_in
    return ProcessStatus(
        rank,
        own.host.partition(" ")[0],
        own.pid,
        state,
        operation,
        at=own.main_thread_at if own.left else own.at or own.main_thread_at,
        # By the clock of its own machine.
        seconds=own.time + age - own.state_since if own.state_since and not own.left else None,
        steps=own.steps,
        steps_per_second=own.steps_per_second or None,
        memory=own.memory or None,
        device_memory=None if own.device_memory < 0 else own.device_memory,
        call=own.number,
        bad_step=own.bad_step,
    )


def _held_up_by(processes: Iterable[ProcessStatus]) -> tuple[int, ...]:
    """Ranks that are not in the newest collective in which others wait."""
    here = list(processes)
    waiting = [one for one in here if one.state == IN_COLLECTIVE and (one.seconds or 0.0) >= _WAITS_AFTER_S]
    if not waiting:
        return ()
    newest = max(one.call for one in waiting)
    return tuple(one.rank for one in here if one.state != IN_COLLECTIVE or one.call != newest)
