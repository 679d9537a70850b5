"""The time account of one process, in files that outlive the process.

    account = TimeAccount.open("project/goodput", rank=0)
    account.enter(STEP)              # time from now on is charged to steps
    with account.on("waiting"):      # the time of this block is charged to waiting

Each process appends lines of JSON to its own file, `rank_0.jsonl`: one when it starts, one when it ends, and in between
lines with the seconds per category so far. Each line is written atomically, at intervals that grow with the length of
the run. The time since the last line is in a small memory-mapped file, `rank_0.live`, which survives the process. The
next process of that rank turns it into a line before it begins.

Steps and waits alternate thousands of times per second, so a wait only adds to a number and writes its begin and end to
the live file; see `TimeAccount.waits`. The account itself is updated ten times per second.
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
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Final

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

_BEGAN, _DOING, _SINCE, _STEP, _BEFORE, _OFFSET, _PAUSED, _RESUMED, _WAIT = range(9)
_SECONDS: Final = 9
"""Positions of the numbers in a live file; the seconds follow them."""

_LIVE: Final = struct.Struct(f"{_SECONDS + len(CATEGORIES)}d")
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
        self.began, doing, self.since, self.step, self.before, offset, paused, resumed, wait = numbers[:_SECONDS]
        self.doing = int(doing)
        self.seconds = dict(zip(CATEGORIES, numbers[_SECONDS:], strict=True))
        last = max(paused, resumed) + offset
        if last > self.since:
            # The waits before the last one are unknown, and count as what the process did between them.
            self.seconds[CATEGORIES[self.doing]] += last - self.since
            self.since = last
            if paused > resumed:
                self.doing = int(wait)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LiveAccount | None:
        """Read a file; None if it does not exist, or is not a live file."""
        try:
            live = cls(_LIVE.unpack(Path(path).read_bytes()))
        except (OSError, struct.error, ValueError, OverflowError, IndexError):
            return None
        sound = 0 <= live.doing < len(CATEGORIES) and 0 < live.began < math.inf and 0 <= live.since < math.inf
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
        marks: when the last short wait began and when it ended, by `time.perf_counter`; in the live file.
        waited: seconds of short waits for data since `since`.
        waited_for_others: seconds of short waits for other processes since `since`.
        due: when a loader reports its next batch, by `time.perf_counter`.
    """

    __slots__ = (
        "_began",
        "_cells",
        "_line_due",
        "_lines",
        "_offset",
        "_thread",
        "before",
        "doing",
        "due",
        "marks",
        "seconds",
        "since",
        "step",
        "waited",
        "waited_for_others",
    )

    def __init__(self, folder: str | os.PathLike[str], rank: int, attempt: int = 0) -> None:
        os.makedirs(folder, exist_ok=True)
        self._lines = os.path.join(folder, f"rank_{rank}.jsonl")
        live = os.path.join(folder, f"rank_{rank}.live")
        self.before = _close_last(self._lines, live)
        self._offset = time.time() - perf_counter()
        self._began = time.time() - _age()
        self._thread = threading.get_ident()
        self._cells = cells = _mapped(live)
        self.marks = cells[_PAUSED : _RESUMED + 1]
        self.since = perf_counter()
        self.doing, self.step = START_UP, 0
        self.waited = self.waited_for_others = self.due = 0.0
        cells[_STEP], cells[_BEFORE], cells[_OFFSET], cells[_WAIT] = 0.0, self.before, self._offset, DATA
        # A list, because reading the mapped file takes longer.
        self.seconds = [0.0] * len(CATEGORIES)
        self.seconds[START_UP] = cells[_SECONDS + START_UP] = time.time() - self._began
        cells[_DOING], cells[_SINCE], cells[_BEGAN] = START_UP, self.since + self._offset, self._began
        append_line(self._lines, {"event": "start", "time": time.time(), "began": self._began, "attempt": attempt})
        self._line_due = self.since + _MOST_OFTEN

    def enter(self, category: int) -> None:
        """Charge the time from now on to another category; write a line if one is due."""
        now = perf_counter()
        cells, seconds, doing = self._cells, self.seconds, self.doing
        waits = self.waited, self.waited_for_others
        self.waited = self.waited_for_others = 0.0
        seconds[DATA] += waits[0]
        seconds[WAITING] += waits[1]
        seconds[doing] += now - self.since - waits[0] - waits[1]
        for changed in (DATA, WAITING, doing):
            cells[_SECONDS + changed] = seconds[changed]
        cells[_DOING] = self.doing = category
        cells[_SINCE], cells[_STEP] = now + self._offset, self.step
        self.since = now
        if now > self._line_due:
            self.write("so far")

    def wait_for_others(self) -> None:
        """Begin a short wait for other processes, until `resume`."""
        self._cells[_WAIT] = WAITING
        self.marks[0] = perf_counter()

    def resume(self) -> bool:
        """End a short wait; False if there was none."""
        marks, cells = self.marks, self._cells
        if marks[0] <= marks[1]:
            return False
        now = perf_counter()
        if cells[_WAIT] == WAITING:
            self.waited_for_others += now - marks[0]
        else:
            self.waited += now - marks[0]
        marks[1], cells[_WAIT] = now, DATA
        return True

    def charge(self, category: int, then: int) -> None:
        """Charge the time since the last change to a category, and the time from now on to another one."""
        self.doing = category
        self.enter(then)

    def close(self) -> None:
        """Write the last line, at the end of the process."""
        self._line_due = math.inf
        self.enter(DOWN)
        self.write("end")

    def write(self, event: str) -> None:
        """Write a line."""
        cells = self._cells
        seconds = dict(zip(CATEGORIES, (round(one, 6) for one in self.seconds), strict=True))
        with contextlib.suppress(OSError):
            append_line(
                self._lines,
                {
                    "event": event,
                    "time": cells[_SINCE],
                    "began": self._began,
                    "step": int(cells[_STEP]),
                    "seconds": seconds,
                },
            )
        so_far = time.time() - self._began
        self._line_due = perf_counter() + min(max(so_far * _PART, _MOST_OFTEN), _LEAST_OFTEN)

    def on(self, share: str) -> _Charged:
        """A context manager that charges the time of its block to a share of `accel_torch.stopwatch`."""
        return _Charged(self, _BY_SHARE[share])

    @property
    def is_mine(self) -> bool:
        """Whether this thread may change the category."""
        return threading.get_ident() == self._thread


class _Charged:
    __slots__ = ("_account", "_before", "_category", "_paused")

    def __init__(self, account: TimeAccount, category: int) -> None:
        self._account, self._category, self._before = account, category, -1

    def __enter__(self) -> None:
        account = self._account
        # Saving includes waiting for other processes, and stays charged to saving.
        if account.is_mine and account.doing not in (SAVING, WAITING):
            self._before = account.doing
            self._paused = account.resume()
            account.enter(self._category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before >= 0:
            account = self._account
            account.enter(self._before)
            if self._paused:
                # Only a loader calls code that is charged during a short wait; its wait goes on.
                account.marks[0] = account.since


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
