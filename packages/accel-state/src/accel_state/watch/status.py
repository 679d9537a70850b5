"""The status of a rank: its last collective, its main thread, its step, and whether it saves or loads.

    os.environ[STATUS_FOLDER] = folder      # the launcher, before it starts the processes
    request_stacks(folder)                  # they capture their main threads for some seconds
    statuses = read_statuses(folder)        # by rank; at most about half a second old

A status is JSON: the text in the record of the process (`record`), which a launcher reads without the store and without
torch, and a value in the store of the run. If a process cannot write (it is stopped, or in native code that holds the
GIL), its last status remains and the `time` in it becomes old. One process of each machine, chosen by the reader, also
writes the statuses of the ranks on other machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple

from accel_state.proc import process_info
from accel_state.untrusted import read_limited
from accel_state.watch.calls import CallLog, UserFrame, call_text, locate, main_thread_frame
from accel_state.watch.record import STARTED, STATUS_RECORD, STEPS, SUFFIX, RecordContent, read_content

__all__ = (
    "EXITED_NORMALLY",
    "IN_COLLECTIVE",
    "RankStatus",
    "World",
    "capture_status",
    "host_with_namespaces",
    "pending_collective",
    "read_records",
    "read_statuses",
    "read_world",
    "request_stacks",
    "request_world",
    "stack_requested",
    "world_requested",
    "write_world",
)

IN_COLLECTIVE: Final = "in collective"
"""`RankStatus.state` of a process in a collective of this library."""

EXITED_NORMALLY: Final = "without an exception"
"""`RankStatus.left` of a process after its script has ended normally."""

# ---------------------------------------------------------------------- the status of a rank

_TYPES_BY_NAME: Final[Mapping[str, Any]] = {"int": int, "str": str, "bool": bool, "float": (int, float)}


@dataclass(frozen=True)
class RankStatus:
    """What one rank does, captured by the rank itself. Times are seconds of the monotonic clock of its machine.

    Args:
        number: number of its last collective; 0 if it has called none.
        operation: name of that collective.
        called_at: line of the user's code that called that collective.
        active: whether it is still in that collective.
        main_thread_at: line of the user's code where the main thread is; empty if the stack was not captured.
        main_thread_in: the library function that was called there; empty if there is none.
        has_stack: whether the stack of the main thread was captured.
        left: how it left the run, such as "without an exception"; empty while it takes part.
        since: when that collective began if it is still active; else 0.
        state: "in collective", what it does instead of training, such as "saving", "in step", or "running" before the
            first step.
        at: line of the user's code that called the collective or began the activity; else empty.
        state_since: when this state or step began; 0 if unknown.
        steps: number of steps of its optimizer.
        steps_per_second: recent steps per second; 0 if unknown.
        folder: folder with the run's output, or empty.
        memory: bytes of memory that it uses, captured with the stack; else 0.
        device_memory: bytes that its tensors use on its device; -1 if they are not counted.
        pid: its process id.
        started: start time of the process in clock ticks since boot, which tells it from a later one with its pid; 0 if
            the system does not report it.
        host: its machine, with the namespaces of process ids and of the network.
        time: when the status was captured.
        group: name of the group of that collective in messages; empty for all processes of the run.
        interruption: which collective was interrupted there and why, until a later one was refused; or empty.
        pending: a collective of torch that has not ended, from torch's flight recorder, captured with the stack; else
            empty.
        waits_for_others: whether the main thread certainly waits for other processes, captured with the stack.
        account: file with the lines of its time account, or empty.
        in_backward: whether it waits in a backward pass, which also computes.
        backwards: number of its calls of `Accelerator.backward` that synchronise gradients.
        bad_step: the last step that a guard found bad, as text; empty if there was none.
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
    state: str = "running"
    at: str = ""
    state_since: float = 0.0
    steps: int = 0
    steps_per_second: float = 0.0
    folder: str = ""
    memory: int = 0
    device_memory: int = -1
    pid: int = field(default_factory=os.getpid)
    started: int = 0
    host: str = field(default_factory=lambda: host_with_namespaces())
    time: float = field(default_factory=time.monotonic)
    group: str = ""
    interruption: str = ""
    pending: str = ""
    waits_for_others: bool = False
    account: str = ""
    in_backward: bool = False
    backwards: int = 0
    bad_step: str = ""

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
        fits = all(isinstance(getattr(status, one.name), _TYPES_BY_NAME[str(one.type)]) for one in fields(cls))
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
        before += f", while {self.pending} is pending" if self.pending else ""
        at = self.main_thread_at
        inside = f"in {self.main_thread_in}() at {at}" if self.main_thread_in else f"at {at}"
        return f"{inside}, {before}" if at else before


def capture_status(
    log: CallLog, stack: bool = False, pinned: UserFrame | None = None, interruption: str = "", left: str = ""
) -> RankStatus:
    """The status of this process.

    Args:
        log: the log of its calls.
        stack: capture the line of the main thread as well.
        pinned: that line, if it is already known.
        interruption: see `RankStatus`.
        left: see `RankStatus`.
    """
    active = log.active()
    call = active or next(iter(log.recent(1)), None)
    frame = pinned or (main_thread_frame() if stack else None)
    (per_second, state_since), activity, at = STATUS_RECORD.pace(), STATUS_RECORD.activity, ""
    state, since = "in step" if STATUS_RECORD.steps else "running", time.monotonic() - active.seconds if active else 0.0
    if activity is not None:
        state, state_since, at = activity.name, activity.since, str(locate(activity.code.co_filename, activity.line))
    elif active is not None:
        state, state_since, at = IN_COLLECTIVE, since, str(active.location)
    info = process_info(os.getpid()) if stack else None
    pending = pending_collective() if stack else ""
    return RankStatus(
        number=call.number if call else 0,
        operation=call.operation if call else "",
        called_at=str(call.location) if call else "",
        active=active is not None,
        main_thread_at=str(frame.location) if frame else "",
        main_thread_in=frame.inside if frame else "",
        has_stack=stack,
        left=left,
        since=since,
        state=state,
        at=at,
        state_since=state_since,
        steps=STATUS_RECORD.steps,
        steps_per_second=per_second,
        folder=STATUS_RECORD.folder,
        memory=info.memory if info else 0,
        device_memory=_device_memory(),
        started=int(STATUS_RECORD.cells[STARTED]),
        group=call.group if call else "",
        interruption=interruption,
        pending=pending,
        waits_for_others=bool(pending) or (frame is not None and frame.waits_for_others),
        account=STATUS_RECORD.account,
        in_backward=frame.in_backward if frame else False,
        backwards=STATUS_RECORD.backwards,
        bad_step=STATUS_RECORD.bad_step,
    )


def _device_memory() -> int:
    # A device that raises must neither end the monitor's thread nor delay its end.
    with contextlib.suppress(Exception):
        used = STATUS_RECORD.device_memory()
        return -1 if used is None else used
    return -1


def host_with_namespaces() -> str:
    """Name of this machine, with its namespaces of process ids and of the network, which differ in a container."""
    names = [socket.gethostname()]
    for kind in ("pid", "net"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(names)


# ---------------------------------------------------------------------- reading the records of a folder

_RECORD_FILE: Final = re.compile(rf"rank(\d{{1,7}})\.(\d{{1,10}}){re.escape(SUFFIX)}")


def read_records(folder: str) -> Iterator[RecordContent]:
    """The records in a folder: one for each process that was started, so several for a rank that was restarted."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for match in filter(None, map(_RECORD_FILE.fullmatch, names)):
        content = read_content(os.path.join(folder, match[0]))
        if content is not None and (content.rank, content.pid) == (int(match[1]), int(match[2])):
            yield content


def read_statuses(folder: str) -> dict[int, RankStatus]:
    """The last status of each rank; ranks that have written none are missing."""
    newest: dict[int, RankStatus] = {}
    for content in read_records(folder):
        status = RankStatus.from_json(content.text) if content.text else None
        if status is not None and (content.rank not in newest or status.time > newest[content.rank].time):
            newest[content.rank] = _with_steps(status, int(content.cells[STEPS]))
    return newest


def _with_steps(status: RankStatus, steps: int) -> RankStatus:
    """The status with the number of steps that the training code wrote since."""
    from dataclasses import replace

    return replace(status, steps=max(status.steps, steps))


# ---------------------------------------------------------------------- requests of readers

_STACK_REQUEST_FILE: Final = "request-stacks"
_WORLD_FILE: Final = "world.json"
_REQUEST_LIFETIME_S: Final = 5.0
"""Seconds for which processes answer a request."""

_MAX_WORLD_BYTES: Final = 64 * 2**20


class World(NamedTuple):
    """The statuses of all ranks, as far as one rank knows them.

    Args:
        statuses: statuses by rank; ranks that never published are missing.
        ages: seconds since the last new status of each rank arrived.
        time: when this was put together, by the monotonic clock.
        read: when the store last answered.
        store_answers: whether it still answers.
    """

    statuses: Mapping[int, RankStatus]
    ages: Mapping[int, float]
    time: float
    read: float
    store_answers: bool


def request_stacks(folder: str) -> None:
    """Request that the processes capture the stacks of their main threads; they publish them within a second."""
    _replace(os.path.join(folder, _STACK_REQUEST_FILE), str(time.monotonic()))


def request_world(folder: str, rank: int) -> None:
    """Request that the process with this rank write the statuses of all ranks; it takes some seconds."""
    _replace(os.path.join(folder, f"request-world-{rank}"), str(time.monotonic()))


def stack_requested(folder: str) -> bool:
    """Whether a reader has requested the line of the main thread."""
    return _is_recent(os.path.join(folder, _STACK_REQUEST_FILE))


def world_requested(folder: str, rank: int) -> bool:
    """Whether a reader has requested that the process with this rank write the statuses of all ranks."""
    return _is_recent(os.path.join(folder, f"request-world-{rank}"))


def write_world(folder: str, world: World) -> None:
    """Replace this machine's file with the statuses of all ranks."""
    ranks = {rank: [world.ages[rank], status.to_json()] for rank, status in world.statuses.items()}
    text = json.dumps({"time": world.time, "read": world.read, "store_answers": world.store_answers, "ranks": ranks})
    _replace(os.path.join(folder, _WORLD_FILE), text)


def read_world(folder: str) -> World | None:
    """The newest statuses of all ranks that a process has written; None if there are none."""
    try:
        content = json.loads(read_limited(os.path.join(folder, _WORLD_FILE), _MAX_WORLD_BYTES))
        statuses, ages = {}, {}
        for rank, (age, text) in content["ranks"].items():
            status = RankStatus.from_json(text)
            if status is not None:
                statuses[int(rank)], ages[int(rank)] = status, float(age)
        return World(statuses, ages, float(content["time"]), float(content["read"]), bool(content["store_answers"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _is_recent(path: str) -> bool:
    try:
        return 0 <= time.monotonic() - float(read_limited(path, 64)) < _REQUEST_LIFETIME_S
    except (OSError, ValueError):
        return False


def _replace(path: str, text: str) -> None:
    partial = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)


# ---------------------------------------------------------------------- torch's flight recorder

# The recorder has the collectives that torch starts itself, and those whose wait is not in a function of
# torch.distributed, such as that for a device. torch records them for NCCL and gloo if `TORCH_FR_BUFFER_SIZE` is above
# zero, which is its default with NCCL.

_DUMP_FUNCTIONS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch that return the recorder's entries as JSON, the newer one first."""

_UNQUEUED_PREFIX: Final = "gloo:"
"""Prefix of collectives that have no separate start: they are never "started"."""


def pending_collective() -> str:
    """The oldest collective of torch that has started and not ended; empty if there is none, or the recorder is off.

    Example: "nccl:all_reduce of default_pg (number 17)".
    """
    distributed: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = next(
        (function for name in _DUMP_FUNCTIONS if (function := getattr(distributed, name, None)) is not None), None
    )
    if dump is None:
        return ""
    try:
        for entry in json.loads(dump(includeCollectives=True, onlyActive=True) or b"{}").get("entries") or ():
            name = str(entry["profiling_name"])
            # A collective that is only queued on a device may wait for computation there.
            if not entry["retired"] and (entry["state"] == "started" or name.startswith(_UNQUEUED_PREFIX)):
                return f"{name} of {entry['process_group'][1]} (number {entry['collective_seq_id']})"
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        # A recorder of another version proves nothing.
        pass
    return ""
