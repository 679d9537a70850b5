"""The time account of one process, in files that outlive the process.

    account = TimeAccount.open("project/goodput", rank=0)
    account.enter(STEP)              # time from now on is charged to steps
    with account.on("waiting"):      # the time of this block is charged to waiting

Each process appends lines of JSON to its own file, `rank_0.jsonl`: one when it starts, one when it ends, and in between
lines with the seconds per category so far. Each line is written atomically, at intervals that grow with the length of
the run. The time since the last line is in a small memory-mapped file, `rank_0.live`, which survives the process. The
next process of that rank turns it into a line before it begins.

A step changes the category twice, which takes less than a microsecond.
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
    "SECONDS_AT",
    "START_UP",
    "STEP",
    "WAITING",
    "LiveAccount",
    "TimeAccount",
    "append_line",
)

GOODPUT_FOLDER: Final = "goodput"
"""Folder of the accounts, inside the run's folder."""

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
_BY_SHARE: Final = {"waiting": WAITING, "saving": SAVING}

P = ParamSpec("P")
R = TypeVar("R")

SECONDS_AT: Final = 5
"""Numbers before the seconds: start of the process, category, start of the category, step, highest step before."""

_CELLS: Final = SECONDS_AT + len(CATEGORIES)
_LIVE: Final = struct.Struct(f"{_CELLS}d")
_MOST_OFTEN: Final = 0.2
_LEAST_OFTEN: Final = 60.0
_PART: Final = 1 / 200
"""Seconds between two lines: this fraction of the time so far, within the two limits above."""


def append_line(path: str | os.PathLike[str], line: dict[str, Any]) -> None:
    """Append a line of JSON atomically: if this process is killed, the line is complete or missing."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


class LiveAccount:
    """The content of a live file.

    Args:
        numbers: the numbers in the file.
    """

    def __init__(self, numbers: tuple[float, ...]) -> None:
        self.began, doing, self.since, self.step, self.before = numbers[:SECONDS_AT]
        self.doing = int(doing)
        self.seconds = dict(zip(CATEGORIES, numbers[SECONDS_AT:], strict=True))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LiveAccount | None:
        """Read a file; None if it does not exist, or is not a live file."""
        try:
            live = cls(_LIVE.unpack(Path(path).read_bytes()))
        except (OSError, struct.error, ValueError):
            return None
        sound = 0 <= live.doing < len(CATEGORIES) and live.began > 0
        return live if sound and all(0 <= one < 1e12 for one in live.seconds.values()) else None

    def line(self) -> dict[str, Any]:
        """The last line that the process would have written."""
        return {
            "event": "left",
            "time": self.since,
            "began": self.began,
            "doing": CATEGORIES[self.doing],
            "step": int(self.step),
            "seconds": self.seconds,
        }


class TimeAccount:
    """How one process spends its time.

    Only the thread that created it changes the category.

    Args:
        folder: folder for the accounts of the run; created if it is missing.
        rank: index of this process.
        attempt: how often the processes were restarted before.

    Attributes:
        doing: the current category, an index of `CATEGORIES`.
        step: number of steps of the run so far; recorded when the category changes next.
        since: when the category last changed, by `time.perf_counter`.
        seconds: seconds of each category until then.
        cells: the numbers of the live file; the seconds begin at `SECONDS_AT`.
        offset: difference between `time.time` and `time.perf_counter`.
        due: when the next line is written, by `time.perf_counter`.
    """

    __slots__ = ("_lines", "_thread", "before", "began", "cells", "doing", "due", "offset", "seconds", "since", "step")

    def __init__(self, folder: str | os.PathLike[str], rank: int, attempt: int = 0) -> None:
        os.makedirs(folder, exist_ok=True)
        self._lines = os.path.join(folder, f"rank_{rank}.jsonl")
        live = os.path.join(folder, f"rank_{rank}.live")
        self.before = _close_last(self._lines, live)
        self.offset = time.time() - perf_counter()
        self.began = time.time() - _age()
        self._thread = threading.get_ident()
        self.cells: Any = _mapped(live)
        self.since = perf_counter()
        self.doing, self.step = START_UP, 0
        cells = self.cells
        cells[0], cells[3], cells[4] = self.began, 0.0, self.before
        # A list, because reading the mapped file takes longer.
        self.seconds = [0.0] * len(CATEGORIES)
        self.seconds[START_UP] = cells[SECONDS_AT + START_UP] = time.time() - self.began
        cells[1], cells[2] = START_UP, self.since + self.offset
        append_line(self._lines, {"event": "start", "time": time.time(), "began": self.began, "attempt": attempt})
        self.due = self.since + _MOST_OFTEN

    def enter(self, category: int) -> None:
        """Charge the time from now on to another category; write a line if one is due."""
        now = perf_counter()
        cells, seconds, doing = self.cells, self.seconds, self.doing
        cells[SECONDS_AT + doing] = seconds[doing] = seconds[doing] + now - self.since
        cells[1] = self.doing = category
        cells[2], cells[3] = now + self.offset, self.step
        self.since = now
        if now > self.due:
            self.write("so far")

    def charge(self, category: int, then: int) -> None:
        """Charge the time since the last change to a category, and the time from now on to another one."""
        self.doing = category
        self.enter(then)

    def close(self) -> None:
        """Write the last line, at the end of the process."""
        self.due = math.inf
        self.enter(DOWN)
        self.write("end")

    def write(self, event: str) -> None:
        """Write a line."""
        cells = self.cells
        seconds = dict(zip(CATEGORIES, (round(one, 6) for one in cells[SECONDS_AT:]), strict=True))
        step = int(cells[3])
        with contextlib.suppress(OSError):
            append_line(
                self._lines,
                {"event": event, "time": cells[2], "began": self.began, "step": step, "seconds": seconds},
            )
        so_far = time.time() - self.began
        self.due = perf_counter() + min(max(so_far * _PART, _MOST_OFTEN), _LEAST_OFTEN)

    def on(self, share: str) -> _Charged:
        """A context manager that charges the time of its block to a share of `accel_torch.stopwatch`."""
        return _Charged(self, _BY_SHARE[share])

    def timed(self, category: int, function: Callable[P, R]) -> Callable[P, R]:
        """A function that charges the time of each call of `function` to a category."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with _Charged(self, category):
                return function(*args, **kwargs)

        return call

    @property
    def is_mine(self) -> bool:
        """Whether this thread may change the category."""
        return threading.get_ident() == self._thread


class _Charged:
    __slots__ = ("_account", "_before", "_category")

    def __init__(self, account: TimeAccount, category: int) -> None:
        self._account, self._category, self._before = account, category, -1

    def __enter__(self) -> None:
        account = self._account
        # Saving includes waiting for other processes, and stays charged to saving.
        if account.is_mine and account.doing not in (SAVING, WAITING):
            self._before = account.doing
            account.enter(self._category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before >= 0:
            self._account.enter(self._before)


def _age() -> float:
    """Seconds since this process was started; 0 if the system does not report it."""
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
    """Write the last line of a process that was killed; return the highest step that the run has reached."""
    last = LiveAccount.read(live)
    if last is None:
        return 0.0
    if not any(line.get("began") == last.began and line["event"] in ("end", "left") for line in _tail(lines)):
        append_line(lines, last.line())
    # The step during which it was killed counts, because its time was charged.
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
