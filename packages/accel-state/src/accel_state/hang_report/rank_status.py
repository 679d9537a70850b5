"""The status that each rank publishes: its last collective, its main thread, its step, and whether it saves or loads.

    os.environ[STATUS_FOLDER] = folder      # the launcher, before it starts the processes
    request_stacks(folder)                  # they capture their main threads for some seconds
    statuses = read_statuses(folder)        # by rank; at most about half a second old

A status is JSON. It is published through the store of the run and through files, which a launcher reads without the
store and without torch. The monitor's thread of each process writes its file twice a second. If a process cannot write
(it is stopped, or in native code that holds the GIL), its last file remains and the `time` in it becomes old. One
process of each machine, chosen by the reader, also writes the statuses of the ranks on other machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple

from accel_state.hang_report.call_log import CallLog, UserFrame, call_text, main_thread_frame
from accel_state.hang_report.progress import PROGRESS, STATUS_FOLDER
from accel_state.proc import process_info

__all__ = (
    "EXITED_NORMALLY",
    "RankStatus",
    "StatusFile",
    "WorldStatus",
    "capture_status",
    "host_with_namespaces",
    "read_statuses",
    "read_world_status",
    "request_stacks",
    "request_world_status",
)

EXITED_NORMALLY: Final = "without an exception"
"""`RankStatus.left` of a process after its script has ended normally."""

# ---------------------------------------------------------------------- the status of a rank

_KINDS: Final[Mapping[str, Any]] = {"int": int, "str": str, "bool": bool, "float": (int, float)}


@dataclass(frozen=True)
class RankStatus:
    """What one rank does, captured by the rank itself.

    Args:
        number: number of its last collective; 0 if it has called none.
        operation: name of that collective.
        called_at: line of the user's code that called that collective.
        active: whether it is still in that collective.
        main_thread_at: line of the user's code where the main thread is; empty if the stack was not captured.
        main_thread_in: the library function that was called there; empty if there is none.
        has_stack: whether the stack of the main thread was captured.
        left: how it left the run, such as "without an exception"; empty while it takes part.
        since: when that collective began if it is still active, in seconds since the epoch; else 0.
        steps: number of steps of its optimizer.
        steps_per_second: recent steps per second; 0 if unknown.
        step_since: when the last step ended, in seconds since the epoch; 0 before the first step.
        activity: what it does instead of training, such as "saving"; or empty.
        activity_at: line of the user's code that began the activity.
        activity_since: when the activity began, in seconds since the epoch.
        folder: folder with the run's output, or empty.
        memory: bytes of memory that it uses, captured with the stack; else 0.
        device_memory: bytes that its tensors use on its device; -1 if they are not counted.
        pid: its process id.
        host: its machine, with the namespaces of process ids and of the network.
        time: when the status was captured, in seconds since the epoch.
        group: name of the group of that collective in messages; empty for all processes of the run.
        interruption: which collective was interrupted there and why, until a later one was refused; or empty.
    """

    number: int
    operation: str
    called_at: str
    active: bool
    main_thread_at: str
    main_thread_in: str
    has_stack: bool = False
    left: str = ""
    since: float = 0.0
    steps: int = 0
    steps_per_second: float = 0.0
    step_since: float = 0.0
    activity: str = ""
    activity_at: str = ""
    activity_since: float = 0.0
    folder: str = ""
    memory: int = 0
    device_memory: int = -1
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=lambda: host_with_namespaces())
    time: float = field(default_factory=time.time)
    group: str = ""
    interruption: str = ""

    def to_json(self) -> str:
        """The status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus | None:
        """The status that `to_json` wrote; None if the text is something else."""
        try:
            status = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        fits = all(isinstance(getattr(status, one.name), _KINDS[str(one.type)]) for one in fields(cls))
        return status if fits else None

    def collective(self) -> str:
        """Its last collective as text."""
        return f"{call_text(self.operation, self.group, self.called_at)} (call {self.number})"

    def position(self) -> str:
        """The position of the process, as text that follows "rank 3 is"."""
        why = f" ({self.interruption})" if self.interruption else ""
        if self.active:
            return f"in {self.collective()}{why}"
        before = f"after {self.collective()}{why}" if self.number else "before any collective"
        at = self.main_thread_at
        inside = f"in {self.main_thread_in}() at {at}" if self.main_thread_in else f"at {at}"
        return f"{inside}, {before}" if at else before


def capture_status(
    log: CallLog, stack: bool = False, pinned: UserFrame | None = None, interruption: str = ""
) -> RankStatus:
    """The status of this process.

    Args:
        log: the log of its calls.
        stack: capture the line of the main thread as well.
        pinned: that line, if it is already known.
        interruption: see `RankStatus`.
    """
    active = log.active()
    call = active or next(iter(log.recent(1)), None)
    frame = pinned or (main_thread_frame() if stack else None)
    clock, pace, activity = time.time(), PROGRESS.pace(), PROGRESS.activity()
    info = process_info(os.getpid()) if stack else None
    return RankStatus(
        number=call.number if call else 0,
        operation=call.operation if call else "",
        called_at=str(call.location) if call else "",
        active=active is not None,
        main_thread_at=str(frame.location) if frame else "",
        main_thread_in=frame.inside if frame else "",
        has_stack=stack,
        since=clock - active.seconds if active else 0.0,
        steps=pace.steps,
        steps_per_second=pace.per_second,
        step_since=clock - pace.seconds if pace.steps else 0.0,
        activity=activity.name if activity else "",
        activity_at=str(activity.location) if activity else "",
        activity_since=clock - activity.seconds if activity else 0.0,
        folder=PROGRESS.folder,
        memory=info.memory if info else 0,
        device_memory=_device_memory(),
        group=call.group if call else "",
        interruption=interruption,
    )


def _device_memory() -> int:
    # A device that raises must neither end the monitor's thread nor delay its end.
    with contextlib.suppress(Exception):
        used = PROGRESS.device_memory()
        return -1 if used is None else used
    return -1


def host_with_namespaces() -> str:
    """Name of this machine, with its namespaces of process ids and of the network, which differ in a container."""
    names = [socket.gethostname()]
    for kind in ("pid", "net"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(names)


# ---------------------------------------------------------------------- files

_STACK_REQUEST: Final = "request-stacks"
_WORLD_REQUEST: Final = "request-world"
_WORLD: Final = "world.json"
_REQUEST_LASTS: Final = 5.0
"""Seconds for which processes answer a request."""

_MOST_BYTES: Final = 64 * 1024
_MOST_BYTES_OF_WORLD: Final = 64 * 2**20


class WorldStatus(NamedTuple):
    """The statuses of all ranks, as one process read them from the store of the run.

    Args:
        time: when it wrote this, in seconds since the epoch.
        store_answers: whether the store answered.
        statuses: statuses by rank; ranks that never published are missing.
        ages: seconds since the last new status of each rank arrived.
    """

    time: float
    store_answers: bool
    statuses: Mapping[int, RankStatus]
    ages: Mapping[int, float]


class StatusFile:
    """The status file of one process.

    Args:
        folder: folder of the file.
        rank: rank of the process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._rank = str(rank)
        self._stack_request = os.path.join(folder, _STACK_REQUEST)
        self._path = os.path.join(folder, f"rank{rank}.json")

    @classmethod
    def of_run(cls, rank: int) -> StatusFile | None:
        """The file of this process, if its launcher has requested one."""
        folder = os.environ.get(STATUS_FOLDER)
        return cls(folder, rank) if folder else None

    def write(self, status: RankStatus) -> None:
        """Replace the content of the file; a missing folder is ignored."""
        _replace(self._path, status.to_json())

    def write_world(self, world: WorldStatus) -> None:
        """Replace this machine's file with the statuses of all ranks."""
        ranks = {rank: [world.ages[rank], status.to_json()] for rank, status in world.statuses.items()}
        text = json.dumps({"time": world.time, "store_answers": world.store_answers, "ranks": ranks})
        _replace(os.path.join(self._folder, _WORLD), text)

    def stack_requested(self) -> bool:
        """Whether a reader has requested the line of the main thread."""
        return _is_recent(self._stack_request)

    def world_requested(self) -> bool:
        """Whether a reader has requested that this process write the statuses of all ranks."""
        path = os.path.join(self._folder, _WORLD_REQUEST)
        if not _is_recent(path):
            return False
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(16) == self._rank
        except OSError:
            return False


def _is_recent(path: str) -> bool:
    try:
        return time.time() - os.stat(path).st_mtime < _REQUEST_LASTS
    except OSError:
        return False


def _replace(path: str, text: str) -> None:
    partial = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)


def request_stacks(folder: str) -> None:
    """Request that the processes capture the stacks of their main threads; they write them within a second."""
    with open(os.path.join(folder, _STACK_REQUEST), "w", encoding="utf-8"):
        pass


def request_world_status(folder: str, rank: int) -> None:
    """Request that the process with this rank write the statuses of all ranks; it takes some seconds."""
    _replace(os.path.join(folder, _WORLD_REQUEST), str(rank))


def read_world_status(folder: str) -> WorldStatus | None:
    """The newest statuses of all ranks that a process has written; None if there are none."""
    try:
        with open(os.path.join(folder, _WORLD), encoding="utf-8", errors="replace") as file:
            content = json.loads(file.read(_MOST_BYTES_OF_WORLD))
        statuses, ages = {}, {}
        for rank, (age, text) in content["ranks"].items():
            status = RankStatus.from_json(text)
            if status is not None:
                statuses[int(rank)], ages[int(rank)] = status, float(age)
        return WorldStatus(float(content["time"]), bool(content["store_answers"]), statuses, ages)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_statuses(folder: str) -> dict[int, RankStatus]:
    """The last status that each process wrote, by rank; processes that wrote none are missing."""
    found: dict[int, RankStatus] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        match = re.fullmatch(r"rank(\d{1,7})\.json", name)
        if match is None:
            continue
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                status = RankStatus.from_json(file.read(_MOST_BYTES))
        except OSError:
            continue
        if status is not None:
            found[int(match[1])] = status
    return found
