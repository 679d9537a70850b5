"""The account of the time of one process, in files that outlive it.

    account = TimeAccount.open("project/goodput", rank=0)
    account.enter(STEP)              # what passes from now on is a step
    with account.on("waiting"):      # and this is not

Each process appends lines of JSON to a file of its own, `rank_0.jsonl`: when it starts and ends, and in between what it
has spent its time on so far. Such a line is written as one piece, and at intervals that grow with the length of the
run. What happened since the last line is in a small file that is mapped into memory, `rank_0.live`, which the system
keeps when the process is killed; the next process of that rank turns it into a line before it begins.

A step costs two changes of what is done, which is less than a microsecond.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from accel_state.proc import process_info

__all__ = (
    "CATEGORIES",
    "DATA",
    "DOWN",
    "EVALUATION",
    "FIRST_STEP",
    "GOODPUT_FOLDER",
    "RECOMPUTED",
    "SAVING",
    "START_UP",
    "STEP",
    "WAITING",
    "LiveAccount",
    "TimeAccount",
    "append_line",
)

GOODPUT_FOLDER: Final = "goodput"
"""Folder of the accounts, inside that of the run."""

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
"""What the time of a run is spent on; "step" is what it is there for."""

START_UP, FIRST_STEP, DATA, STEP, EVALUATION, SAVING, RECOMPUTED, WAITING, DOWN = range(len(CATEGORIES))
_BY_SHARE: Final = {"waiting": WAITING, "saving": SAVING}

P = ParamSpec("P")
R = TypeVar("R")

_HEAD: Final = 5
"""Numbers before the seconds: when the process began, the doing, since when, the step, the greatest step before."""

_CELLS: Final = _HEAD + len(CATEGORIES)
_LIVE: Final = struct.Struct(f"{_CELLS}d")
_MOST_OFTEN: Final = 0.2
_LEAST_OFTEN: Final = 60.0
_PART: Final = 1 / 200
"""Seconds between two lines: this part of the time so far, at least and at most so many."""


def append_line(path: str | os.PathLike[str], line: dict[str, Any]) -> None:
    """Append a line of JSON in one piece, so that it is there as a whole or not at all when this process is killed."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


class LiveAccount:
    """What a live file holds.

    Args:
        numbers: its content.
    """

    def __init__(self, numbers: tuple[float, ...]) -> None:
        self.began, doing, self.since, self.step, self.before = numbers[:_HEAD]
        self.doing = int(doing)
        self.seconds = dict(zip(CATEGORIES, numbers[_HEAD:], strict=True))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LiveAccount | None:
        """That of a file; None where there is none, or it holds something else."""
        try:
            live = cls(_LIVE.unpack(Path(path).read_bytes()))
        except (OSError, struct.error, ValueError):
            return None
        sound = 0 <= live.doing < len(CATEGORIES) and live.began > 0
        return live if sound and all(0 <= one < 1e12 for one in live.seconds.values()) else None

    def line(self) -> dict[str, Any]:
        """The line that the process would have written last."""
        return {
            "event": "left",
            "time": self.since,
            "began": self.began,
            "doing": CATEGORIES[self.doing],
            "step": int(self.step),
            "seconds": self.seconds,
        }


class TimeAccount:
    """What one process spends its time on.

    Only the thread that made it changes what is done.

    Args:
        folder: of the accounts of the run; made where it is missing.
        rank: index of this process.
        attempt: how often the processes were started again before.

    Attributes:
        doing: what the time is charged to now, an index of `CATEGORIES`.
        step: steps that the run has made; recorded with the next change of what is done.
    """

    __slots__ = ("_cells", "_due", "_lines", "_offset", "_thread", "before", "began", "doing", "since", "step")

    def __init__(self, folder: str | os.PathLike[str], rank: int, attempt: int = 0) -> None:
        os.makedirs(folder, exist_ok=True)
        self._lines = os.path.join(folder, f"rank_{rank}.jsonl")
        live = os.path.join(folder, f"rank_{rank}.live")
        self.before = _close_last(self._lines, live)
        self._offset = time.time() - perf_counter()
        self.began = time.time() - _age()
        self._thread = threading.get_ident()
        self._cells: Any = _mapped(live)
        self.since = perf_counter()
        self.doing, self.step = START_UP, 0
        cells = self._cells
        cells[0], cells[3], cells[4] = self.began, 0.0, self.before
        cells[_HEAD + START_UP] = time.time() - self.began
        cells[1], cells[2] = START_UP, self.since + self._offset
        append_line(self._lines, {"event": "start", "time": time.time(), "began": self.began, "attempt": attempt})
        self._due = self.since + _MOST_OFTEN

    def enter(self, category: int) -> None:
        """What passes from now on is charged to another category; a line is written where one is due."""
        now = perf_counter()
        cells = self._cells
        cells[_HEAD + self.doing] += now - self.since
        cells[1] = self.doing = category
        cells[2], cells[3] = now + self._offset, self.step
        self.since = now
        if now > self._due:
            self._write("so far")

    def charge(self, category: int, then: int) -> None:
        """Charge what passed since the last change to a category, and what follows to another one."""
        self.doing = category
        self.enter(then)

    def close(self) -> None:
        """Write the last line; what follows is the end of the process."""
        self._due = math.inf
        self.enter(DOWN)
        self._write("end")

    def _write(self, event: str) -> None:
        cells = self._cells
        seconds = dict(zip(CATEGORIES, (round(one, 6) for one in cells[_HEAD:]), strict=True))
        step = int(cells[3])
        with contextlib.suppress(OSError):
            append_line(
                self._lines,
                {"event": event, "time": cells[2], "began": self.began, "step": step, "seconds": seconds},
            )
        so_far = time.time() - self.began
        self._due = perf_counter() + min(max(so_far * _PART, _MOST_OFTEN), _LEAST_OFTEN)

    def on(self, share: str) -> _Charged:
        """A block whose time is charged to a share of `accel_torch.stopwatch`."""
        return _Charged(self, _BY_SHARE[share])

    def timed(self, category: int, function: Callable[P, R]) -> Callable[P, R]:
        """A function whose time is charged to a category."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with _Charged(self, category):
                return function(*args, **kwargs)

        return call

    @property
    def is_mine(self) -> bool:
        """Whether this thread may change what is done."""
        return threading.get_ident() == self._thread


class _Charged:
    __slots__ = ("_account", "_before", "_category")

    def __init__(self, account: TimeAccount, category: int) -> None:
        self._account, self._category, self._before = account, category, -1

    def __enter__(self) -> None:
        account = self._account
        # Saving waits for other processes too, and stays what it is.
        if account.is_mine and account.doing not in (SAVING, WAITING):
            self._before = account.doing
            account.enter(self._category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before >= 0:
            self._account.enter(self._before)


def _age() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    info = process_info(os.getpid())
    if info is None:
        return 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - info.started / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0


def _mapped(path: str) -> Any:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.ftruncate(file, _LIVE.size)
        return memoryview(mmap.mmap(file, _LIVE.size)).cast("d")
    finally:
        os.close(file)


def _close_last(lines: str, live: str) -> float:
    """Write the last line of a process that was killed; the greatest step that the run has reached."""
    last = LiveAccount.read(live)
    if last is None:
        return 0.0
    if not any(line.get("began") == last.began and line["event"] in ("end", "left") for line in _tail(lines)):
        append_line(lines, last.line())
    # The step that it was in has begun, and its time was charged.
    begun = last.doing in (FIRST_STEP, STEP, RECOMPUTED)
    return max(last.step + begun, last.before)


def _tail(path: str) -> Iterator[dict[str, Any]]:
    """The last lines of a file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "event" in found:
                yield found
