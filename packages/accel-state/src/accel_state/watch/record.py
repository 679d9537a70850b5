"""The status record of this process: a small mapped file, which others read while it runs and after it was killed.

    STATUS_RECORD.open(folder, rank)                        # before that, the numbers are in private memory
    STATUS_RECORD.cells[STEPS] = STATUS_RECORD.steps = 7    # the training code: plain stores, without a system call
    STATUS_RECORD.enter(STEP)                               # time from now on is charged to steps
    STATUS_RECORD.publish(text)                             # the monitor's thread: the rest of the status, as JSON

The file is in the private folder of a launcher. Only its own process opens it for writing, and it has its space
before it is mapped: a mapping without space on the disk, or of a file that became shorter, would end the process by
SIGBUS. Where there is no folder or no space, the record stays in private memory and the run goes on.

Layout, in the byte order of the machine: the text `MAGIC`, which has the version; numbers of 8 bytes, at the positions
below; the ids of the current samples, as JSON that ends with a zero byte; and two slots for the status text, of which
the number at `SLOT` names the newest. All times are seconds of the monotonic clock, which the processes of a machine
share: no step of the wall clock changes a decision.

The last numbers are the seconds that this process spent on each category. When it turns to another category, the time
since the last change is added to one number. Their sum is therefore the time of that change, and a process that is
killed at any moment leaves a record that adds up. What a loop does with a batch is known afterwards: a step if an
optimizer stepped, or else evaluation. Until then its time is undecided, and counts as the likely category.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from accel_state.library import caller
from accel_state.proc import process_info, state_of

if TYPE_CHECKING:
    import mmap

__all__ = (
    "CATEGORIES",
    "DATA",
    "DOWN",
    "EVALUATION",
    "FIRST_STEP",
    "RECOMPUTED",
    "SAVING",
    "START_UP",
    "STATUS_FOLDER",
    "STATUS_RECORD",
    "STEP",
    "STEPS",
    "UNDECIDED",
    "WAITING",
    "Activity",
    "RecordContent",
    "StatusRecord",
    "read_content",
)

STATUS_FOLDER: Final = "ACCEL_STATUS_FOLDER"
"""Variable with the folder of the records; without it, a process has a record in private memory only."""

SUFFIX: Final = ".status"
"""Suffix of the files; their names are those of `record_name`."""

MAGIC: Final = b"accel-1\n"

CATEGORIES: Final = (
    "start-up",
    "first step",
    "waiting for data",
    "step",
    "evaluation",
    "checkpoint stall",
    "recomputed work",
    "waiting for other processes",
    "down",
)
"""Categories of the time of a run; only "step" is useful work."""

START_UP, FIRST_STEP, DATA, STEP, EVALUATION, SAVING, RECOMPUTED, WAITING, DOWN = range(len(CATEGORIES))

UNDECIDED: Final = len(CATEGORIES)
"""Position behind the seconds of the categories, for the time whose category is not known yet."""

(PID, STARTED, RANK, STEPS, LOADED, SLOT, BEGAN, WALL, DOING, LIKELY, UNDER_WAY, BEFORE, SECONDS) = range(13)
"""Positions of the numbers: the process; its steps, and those of the run before the checkpoint that it has loaded; the
slot of the text; when the process was started (0: its time is not recorded), by the monotonic clock, and what has to be
added for the wall clock; its category (`UNDECIDED` is one), and the likely category of undecided time, and the step of
the run that is then under way; the highest step that earlier processes of this rank have begun. At last the seconds."""

_UNDECIDED_INDEX: Final = SECONDS + UNDECIDED
_NUMBER_COUNT: Final = SECONDS + len(CATEGORIES) + 1
_SAMPLES_OFFSET: Final = len(MAGIC) + 8 * _NUMBER_COUNT
_MAX_SAMPLES_BYTES: Final = 2048
_TEXTS_OFFSET: Final = _SAMPLES_OFFSET + _MAX_SAMPLES_BYTES
_MAX_TEXT_BYTES: Final = 64 * 1024
_RECORD_BYTES: Final = _TEXTS_OFFSET + 2 * _MAX_TEXT_BYTES

_MAX_STEP_TIMES: Final = 32
"""Number of times of recent steps from which the pace is computed: 16 seconds, or as many steps."""


class Activity(NamedTuple):
    """What a process does instead of training.

    Args:
        name: name of the activity, such as "saving".
        code: code object of the function of the user that began it.
        line: the line there.
        since: when it began.
    """

    name: str
    code: CodeType
    line: int
    since: float


class StatusRecord:
    """The record of this process.

    Attributes:
        steps: steps since the process was started, of the optimizer with the most steps; also in `cells`.
        stepped: set to True by every step of any optimizer.
        loaded: steps of the run before the checkpoint that this process has loaded.
        backwards: number of calls of `Accelerator.backward` that synchronise gradients between the processes.
        cells: the numbers of the record, by position.
        status_folder: folder of the file; empty while there is none.
        samples: returns the ids of the samples of the current batch, or of the batch with a number in the epoch; empty
            if they are not known.
        folder: folder with the run's output, or empty.
        bad_step: the last step that a guard found bad, as text; empty if there was none.
        device_memory: returns the bytes that this process uses on its device; None if they are not counted.
        activity: what this process does instead of training.
        account: file to which the monitor's thread appends the seconds (`goodput`); empty if there is none.
        doing: the current category, or `UNDECIDED`.
        since: when the category last changed.
    """

    __slots__ = (
        "_memory",
        "_moments",
        "_thread",
        "account",
        "activity",
        "backwards",
        "bad_step",
        "cells",
        "device_memory",
        "doing",
        "folder",
        "loaded",
        "samples",
        "since",
        "status_folder",
        "stepped",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = self.loaded = self.backwards = 0
        self.cells: Any = memoryview(bytearray(8 * _NUMBER_COUNT)).cast("d")
        self.status_folder = self.folder = self.bad_step = ""
        self.samples: Callable[[int | None], list[str]] = lambda read: []
        self.device_memory: Callable[[], int | None] = lambda: None
        self.account = ""
        self.stepped = False
        self.doing, self.since, self._thread = START_UP, monotonic(), 0
        self._memory: mmap.mmap | None = None
        # Replaced as a whole, because the monitor's thread may read it at any moment.
        self.activity: Activity | None = None
        self._moments: deque[tuple[float, int]] = deque(maxlen=_MAX_STEP_TIMES)

    def open(self, folder: str, rank: int) -> None:
        """Keep the record in a file of a folder from now on; without space for it, it stays in private memory."""
        import mmap

        if self.status_folder == folder and self.cells[RANK] == rank:
            return
        path = os.path.join(folder, f"rank{rank}.{os.getpid()}{SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            # That of an earlier process with this pid.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            file = os.open(path, flags, 0o600)
            try:
                _allocate(file, _RECORD_BYTES)
                memory = mmap.mmap(file, _RECORD_BYTES)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(file)
        except OSError:
            return
        memory[len(MAGIC) : _SAMPLES_OFFSET] = self.cells.tobytes()
        memory[: len(MAGIC)] = MAGIC
        info = process_info(os.getpid())
        self._memory, self.status_folder = memory, folder
        self.cells = memoryview(memory)[len(MAGIC) : _SAMPLES_OFFSET].cast("d")
        self.cells[PID], self.cells[STARTED], self.cells[RANK] = os.getpid(), info.started if info else 0, rank

    def leave_to_parent(self) -> None:
        """In a forked process: keep the numbers in private memory, because the file is the parent's."""
        self._memory, self.status_folder = None, ""
        self.cells = memoryview(bytearray(self.cells.tobytes())).cast("d")

    def publish(self, text: str) -> None:
        """Replace the status text. A reader, or a kill at any moment, finds the one before or this one."""
        content = text.encode() + b"\0"
        if self._memory is not None and len(content) <= _MAX_TEXT_BYTES:
            slot = 1 - int(self.cells[SLOT])
            begin = _TEXTS_OFFSET + slot * _MAX_TEXT_BYTES
            self._memory[begin : begin + len(content)] = content
            self.cells[SLOT] = slot

    def write_samples(self, text: str) -> None:
        """Replace the ids of the current samples, as JSON; a long list is left out."""
        content = text.encode() + b"\0"
        if self._memory is not None and len(content) <= _MAX_SAMPLES_BYTES:
            self._memory[_SAMPLES_OFFSET : _SAMPLES_OFFSET + len(content)] = content

    def writes_to(self, folder: str | os.PathLike[str]) -> None:
        """Record the folder of the run; only the first call has an effect."""
        self.folder = self.folder or os.path.abspath(folder)

    @property
    def run_step(self) -> int:
        """Number of steps of the run, over all its restarts, that led to the state of this process."""
        return self.loaded + self.steps

    def went_back_to(self, step: int) -> None:
        """Record that a checkpoint was loaded, which the run had saved after `step` steps."""
        self.cells[LOADED] = self.loaded = step - self.steps

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record what this process does inside the block."""
        before = self.activity
        self.activity = Activity(name, *caller(), monotonic())
        try:
            yield
        finally:
            self.activity = before

    # ------------------------------------------------------------------ the time by category

    def begin_account(self) -> None:
        """Record on what this process spends its time, from its start on; only this thread changes the category."""
        self._thread, age = threading.get_ident(), _age()
        self.doing, self.since = START_UP, monotonic()
        self.cells[SECONDS:] = memoryview(bytes(8 * (len(CATEGORIES) + 1))).cast("d")
        self.cells[SECONDS], self.cells[DOING] = age, START_UP
        self.cells[WALL], self.cells[BEGAN] = time.time() - self.since, self.since - age

    @property
    def seconds(self) -> list[float]:
        """Seconds by category until the last change, and at last those that are undecided."""
        return list(self.cells[SECONDS:])

    def enter(self, category: int, decided: int | None = None) -> None:
        """Charge the time from now on to another category, or leave it undecided.

        Args:
            category: the category, or `UNDECIDED`.
            decided: the category of the time that is undecided until now.
        """
        now, cells, doing = monotonic(), self.cells, self.doing
        spent = now - self.since
        if decided is not None:
            undecided = cells[_UNDECIDED_INDEX]
            if undecided:
                # In this order, a reader misses the time instead of seeing it twice.
                cells[_UNDECIDED_INDEX] = 0.0
                cells[SECONDS + decided] += undecided
            if doing == UNDECIDED:
                doing = decided
        cells[SECONDS + doing] += spent
        self.since = now
        self.doing = cells[DOING] = category

    def begin(self, category: int) -> int | None:
        """Charge the time from now on to saving or waiting; return the category that is to be entered afterwards.

        None if this time is charged already, because saving includes waiting, or if this is another thread.
        """
        before = self.doing
        if not self.is_mine or before in (SAVING, WAITING):
            return None
        self.enter(category)
        return before

    @property
    def is_mine(self) -> bool:
        """Whether this thread may change the category."""
        return threading.get_ident() == self._thread

    # ------------------------------------------------------------------ for the monitor's thread

    def pace(self) -> tuple[float, float]:
        """Recent steps per second (0 before two steps were seen), and when the last step was seen (0: none).

        The monitor's thread calls it; it sees a step up to one pause of that thread late.
        """
        now, steps = monotonic(), self.steps
        if not steps:
            return 0.0, 0.0
        if not self._moments or self._moments[-1][1] != steps:
            self._moments.append((now, steps))
        (first, fewer), (last, more) = self._moments[0], self._moments[-1]
        return (more - fewer) / (last - first) if last > first else 0.0, last


STATUS_RECORD: Final = StatusRecord()
"""The record of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STATUS_RECORD.leave_to_parent)


def _age() -> float:
    """Seconds since this process was started; 0 if the system does not report it."""
    info = process_info(os.getpid())
    if info is None:
        return 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - info.started / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0


def _allocate(file: int, size: int) -> None:
    """Give a file its space; an error of a full disk comes here, and not when the mapped memory is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    elif os.write(file, bytes(size)) != size:
        raise OSError("The disk is full.")


class RecordContent(NamedTuple):
    """What a reader finds in a record.

    Args:
        cells: the numbers, by position.
        samples: ids of the samples that the process last read, if it writes them.
        text: the status text; empty if it was not published yet.
    """

    cells: tuple[float, ...]
    samples: list[str]
    text: bytes

    @property
    def rank(self) -> int:
        """Rank of the process."""
        return int(self.cells[RANK])

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.cells[PID])

    @property
    def run_step(self) -> int:
        """Number of completed steps of the run."""
        return int(self.cells[LOADED] + self.cells[STEPS])

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; another one may have its pid meanwhile, and has another start time."""
        info = process_info(self.pid)
        if info is None:
            return state_of(self.pid) == "alive"
        return info.state != "ended" and info.started == self.cells[STARTED]


def read_content(path: str) -> RecordContent | None:
    """Read the record of another process; None if the file is not a record of this version."""
    import json
    import struct

    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            content = file.read(_RECORD_BYTES)
        cells = struct.unpack_from(f"{_NUMBER_COUNT}d", content, len(MAGIC))
        if len(content) != _RECORD_BYTES or content[: len(MAGIC)] != MAGIC or cells[SLOT] not in (0, 1):
            return None
        begin = _TEXTS_OFFSET + int(cells[SLOT]) * _MAX_TEXT_BYTES
        text = content[begin : begin + _MAX_TEXT_BYTES].partition(b"\0")[0]
        # Comparisons are false for a number that is none.
        if not all(0 <= cells[one] < 2**53 for one in (PID, STARTED, RANK, STEPS)) or not abs(cells[LOADED]) < 2**53:
            return None
    except (OSError, struct.error):
        return None
    samples: Any = []
    with contextlib.suppress(ValueError, RecursionError):
        samples = json.loads(content[_SAMPLES_OFFSET:_TEXTS_OFFSET].partition(b"\0")[0])
    return RecordContent(cells, [str(one) for one in samples] if isinstance(samples, list) else [], text)
