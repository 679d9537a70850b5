"""What every process of a run does, put together from what it wrote, from the operating system, and from its stack.

    for process in look_at(find_run("4711")).processes:
        print(process.rank, process.state, process.at)

A process that trains answers where it is within a second, by the thread that reports. One that does not answer is
looked at from outside: the system says whether it is there, stopped, or inside of a call on a file, and its stack says
whether it still imports. So nothing here waits for a process, nor for the store of the run.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from accel_state.hang_report.call_log import IMPORT
from accel_state.hang_report.rank_status import (
    STATUS_FOLDER,
    RankStatus,
    WorldStatus,
    read_statuses,
    read_world_status,
    request_stacks,
    request_world_status,
)
from accel_state.proc import ProcessInfo, environment_of, process_info, state_of, system_call
from accel_state.run_status.find import LaunchedRun
from accel_state.run_status.stacks import (
    SUFFIX,
    frames_of_main_thread,
    imports,
    place_in,
    py_spy_stack,
    signalled_stacks,
)

__all__ = ("ProcessStatus", "RunStatus", "look_at")

_SILENT: Final = 3.0
"""Seconds without news after which a process is silent; it writes twice a second."""

_ANSWER: Final = 2.0
"""Seconds that processes of this machine are given to say where their main threads are."""

_ANSWER_OF_OTHERS: Final = 3.5
"""The same for those of other machines, whose answers go through the store."""

_GLANCE: Final = 0.05
_WAITS: Final = 2.0
"""Seconds in a collective after which those that are not in it are said to hold it up."""

_STACK_FILE: Final = re.compile(rf"rank(\d{{1,7}})\.(\d{{1,10}}){re.escape(SUFFIX)}")
_WAITING: Final = "waiting for others"


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a run.

    Args:
        rank: index among all processes.
        host: name of its machine.
        pid: its process id there; 0 where it was never heard of.
        state: "importing", "waiting for others" (to begin), "in collective", "in step", "saving", "loading", "in file
            IO", "running" (before the first step), "silent" (it is there and does not answer), "stopped", "finished",
            "dead" or "unknown".
        operation: the collective, the call on a file, or the function of a library that it is in; or empty.
        at: line of the user's code where it is, or was seen last; empty where that is not known.
        seconds: for how long it has been in this state, or in this step; None where that is not known.
        steps: steps that its optimizer has made.
        steps_per_second: of late; None where that is not known.
        memory: bytes of memory that it uses; None where that is not known.
        call: number of its last collective, 0 where it made none.
        stack: the stacks of its threads, where they were wanted.
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
    call: int = 0
    stack: str = ""


class RunStatus(NamedTuple):
    """A run at one moment.

    Args:
        run: which.
        world_size: number of its processes, on all machines.
        processes: those that are known, by rank.
        held_up_by: ranks that are not in the collective in which others wait.
        store_answers: whether processes of other machines could be heard of; None where there are none.
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
    def is_there(self) -> bool:
        return self.info.state != "ended" if self.info is not None else state_of(self.pid) != "ended"

    @property
    def runs(self) -> bool:
        return self.is_there and (self.info is None or self.info.state != "stopped")


def look_at(run: LaunchedRun, stacks: bool = False) -> RunStatus:
    """What every process of a run does now; within five seconds, whatever the processes do.

    Args:
        run: which.
        stacks: bring the Python stacks of the processes of this machine; py-spy may take longer.
    """
    begun = time.time()
    request_stacks(run.status_folder)
    known = _processes(run.status_folder)
    seen = _statuses(run.status_folder, known)
    size = _world_size(known)
    fresh = [rank for rank, one in seen.items() if known[rank].runs and _is_reporting(one)]
    elsewhere = size > len(known)
    if elsewhere and fresh:
        request_world_status(run.status_folder, min(fresh))
    heard = _wait_for_answers(run.status_folder, known, fresh, begun, elsewhere and bool(fresh))
    known = _processes(run.status_folder)
    seen = _statuses(run.status_folder, known)
    answered = {rank for rank, one in seen.items() if _has_answered(one, begun)}
    looked_at = [one for rank, one in known.items() if one.runs and (stacks or rank not in answered)]
    written = signalled_stacks({one.pid: one.stack_file for one in looked_at})
    statuses = [_status(rank, one, seen.get(rank), written.get(one.pid, ""), run) for rank, one in known.items()]
    if stacks:
        statuses = [replace(one, stack=_stack(known[one.rank], written)) for one in statuses]
    statuses += [_remote(rank, heard) for rank in range(size) if rank not in known]
    ordered = tuple(sorted(statuses, key=lambda one: one.rank))
    answers = (heard is not None and heard.store_answers) if elsewhere else None
    return RunStatus(run, size, ordered, _held_up_by(ordered), answers)


def _processes(folder: str) -> dict[int, _Process]:
    """The processes of this machine by rank; of one that was started again, the last one."""
    found: dict[int, tuple[bool, float, _Process]] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        # The run has ended meanwhile.
        return {}
    for match in filter(None, map(_STACK_FILE.fullmatch, names)):
        rank, pid, path = int(match[1]), int(match[2]), os.path.join(folder, match[0])
        info = process_info(pid)
        if info is not None and info.state != "ended" and environment_of(pid).get(STATUS_FOLDER) != folder:
            # Another process has its pid by now.
            info = info._replace(state="ended")
        process = _Process(pid, info, path)
        order = (process.is_there, _written(path), process)
        if rank not in found or order[:2] > found[rank][:2]:
            found[rank] = order
    return {rank: process for rank, (_, _, process) in found.items()}


def _written(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _statuses(folder: str, known: Mapping[int, _Process]) -> dict[int, RankStatus]:
    """What the processes wrote of themselves; not what an earlier one of the same rank wrote."""
    return {rank: one for rank, one in read_statuses(folder).items() if rank in known and known[rank].pid == one.pid}


def _world_size(known: Mapping[int, _Process]) -> int:
    told = (environment_of(one.pid).get("WORLD_SIZE", "") for one in known.values() if one.is_there)
    size = next((int(text) for text in told if text.isdecimal()), 0)
    return max(size, max(known, default=-1) + 1)


def _is_reporting(seen: RankStatus) -> bool:
    """Whether the thread of a process that reports goes on."""
    return seen.activity != _WAITING and time.time() - seen.time < _SILENT


def _has_answered(seen: RankStatus, begun: float) -> bool:
    return bool(seen.left) or seen.activity == _WAITING or (seen.has_stack and seen.time >= begun)


def _wait_for_answers(
    folder: str, known: Mapping[int, _Process], fresh: Iterable[int], begun: float, others: bool
) -> WorldStatus | None:
    """Wait until processes that can have said where they are, and one of them where those of other machines are."""
    missing = set(fresh)
    while True:
        seen = _statuses(folder, known)
        missing = {rank for rank in missing if rank in seen and not _has_answered(seen[rank], begun)}
        heard = read_world_status(folder) if others else None
        waited = time.time() - begun
        told = heard is not None and heard.time >= begun and _all_answered(heard, begun)
        if (not missing or waited > _ANSWER) and (not others or told or waited > _ANSWER_OF_OTHERS):
            return heard if heard is not None and heard.time >= begun else None
        time.sleep(_GLANCE)


def _all_answered(heard: WorldStatus, begun: float) -> bool:
    return not heard.store_answers or all(
        seen.left or heard.ages[rank] > _SILENT or (seen.has_stack and heard.time - heard.ages[rank] >= begun)
        for rank, seen in heard.statuses.items()
    )


def _stack(process: _Process, written: Mapping[int, str]) -> str:
    """The stacks of the threads of a process, by py-spy or as it wrote them."""
    by_py_spy = py_spy_stack(process.pid, stopped=not process.runs) if process.is_there else ""
    return by_py_spy or written.get(process.pid, "")


def _status(rank: int, process: _Process, seen: RankStatus | None, stack: str, run: LaunchedRun) -> ProcessStatus:
    """One process of this machine."""
    host = socket.gethostname()
    status = ProcessStatus(rank, host, process.pid, "running") if seen is None else _told(rank, seen, host)
    frames = frames_of_main_thread(stack)
    place = place_in(frames, run.working_folder)
    if place is not None and status.state in ("running", "in step"):
        status = replace(status, operation=place.inside, at=str(place.location))
    if status.state == "running" and (status.operation == IMPORT or imports(frames)):
        status = replace(status, state="importing", operation="")
    if process.info is not None and process.is_there:
        status = replace(status, memory=process.info.memory)
    call = system_call(process.pid) if process.runs else ""
    state, operation, seconds = _from_outside(process, seen, call, status)
    return replace(status, state=state, operation=operation, seconds=seconds)


def _from_outside(
    process: _Process, seen: RankStatus | None, call: str, status: ProcessStatus
) -> tuple[str, str, float | None]:
    """State, operation and seconds of a process, by what the system says and else by what it wrote."""
    if not process.is_there:
        return ("finished" if seen is not None and seen.left == "without an exception" else "dead"), "", None
    if not process.runs:
        return "stopped", status.operation, None
    blocked = process.info is not None and process.info.state == "uninterruptible"
    if (call or blocked) and status.state in ("running", "in step"):
        return "in file IO", call, None
    if seen is not None and not seen.left and seen.activity != _WAITING and time.time() - seen.time > _SILENT:
        return "silent", status.operation, time.time() - seen.time
    return status.state, status.operation, status.seconds


def _told(rank: int, seen: RankStatus, host: str) -> ProcessStatus:
    """A process by what it wrote."""
    now = time.time()
    base = ProcessStatus(
        rank=rank,
        host=host,
        pid=seen.pid,
        state="running",
        operation=seen.main_thread_in,
        at=seen.main_thread_at,
        steps=seen.steps,
        steps_per_second=seen.steps_per_second or None,
        memory=seen.memory or None,
        call=seen.number,
    )
    if seen.left:
        return replace(base, state="finished" if seen.left == "without an exception" else "dead", operation="")
    if seen.activity:
        since = now - seen.activity_since
        return replace(base, state=seen.activity, operation="", at=seen.activity_at, seconds=since)
    if seen.active:
        return replace(
            base, state="in collective", operation=seen.operation, at=seen.called_at, seconds=now - seen.since
        )
    return replace(base, state="in step", seconds=now - seen.step_since) if seen.steps else base


def _remote(rank: int, heard: WorldStatus | None) -> ProcessStatus:
    """A process of another machine, as one of this machine heard of it."""
    seen = None if heard is None else heard.statuses.get(rank)
    if heard is None or seen is None:
        return ProcessStatus(rank, "", 0, "unknown")
    status, age = _told(rank, seen, seen.host.partition(" ")[0]), heard.ages[rank]
    # What it has waited for goes on where it wrote nothing since.
    return replace(status, state="silent", seconds=age) if age > _SILENT and not seen.left else status


def _held_up_by(processes: Iterable[ProcessStatus]) -> tuple[int, ...]:
    """Ranks that are not in the newest collective in which others wait."""
    here = list(processes)
    waiting = [one for one in here if one.state == "in collective" and (one.seconds or 0.0) >= _WAITS]
    if not waiting:
        return ()
    newest = max(one.call for one in waiting)
    return tuple(one.rank for one in here if one.state != "in collective" or one.call != newest)
