"""The time account of a process: how many seconds it spent on what, as numbers in its status record.

    account = TimeAccount(STATUS_RECORD, "project/goodput/rank_0.jsonl")
    account.enter(STEP)              # time from now on is charged to steps
    with account.on(WAITING):        # the time of this block is charged to waiting

The numbers are always those of this moment, also after the process was killed. The monitor's thread appends them as
lines of JSON to a file of the project, at intervals that grow with the length of the run: nothing there is mapped, and
a disk that is full, or a file that somebody truncates, costs lines and never the run. When a process was killed, its
launcher appends the last line from the record (`close_accounts`), or else the next process of that rank does.

What a loop does with a batch is known afterwards: a step if an optimizer stepped, or else evaluation. Until then its
time is undecided, and charged to the likely category if the process is killed. Steps and waits alternate thousands of
times per second, so a wait only adds to a number and writes its begin and end into the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from time import monotonic
from types import TracebackType
from typing import Any, Final

from accel_state.proc import process_info
from accel_state.untrusted import open_regular
from accel_state.watch.record import (
    ACCOUNT,
    BEFORE,
    BEGAN,
    CATEGORIES,
    DOING,
    PAUSED,
    REACHED,
    RESUMED,
    SECONDS,
    SINCE,
    UNDECIDED,
    WAIT,
    WALL,
    RecordContent,
    StatusRecord,
)
from accel_state.watch.status import RankStatus, read_records

__all__ = (
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
    "TimeAccount",
    "account_line",
    "append_line",
    "close_accounts",
)

GOODPUT_FOLDER: Final = "goodput"
"""Folder of the lines, inside the run's folder."""

START_UP, FIRST_STEP, DATA, STEP, EVALUATION, SAVING, RECOMPUTED, WAITING, DOWN = range(len(CATEGORIES))

_STEPS: Final = frozenset({CATEGORIES[FIRST_STEP], CATEGORIES[STEP], CATEGORIES[RECOMPUTED]})

_CHANGING: Final = 1.0
_STABLE: Final = 2.0
"""Values at `ACCOUNT` while several numbers change, and when they belong together; 0 if there is no account."""

_TAIL: Final = 64 * 1024
"""Bytes at the end of a file in which its last lines are looked for."""

_LEAST_OFTEN: Final = 60.0
_PART: Final = 1 / 200
"""Seconds between two lines: this fraction of the time so far, within the pause of the monitor and the limit above."""


def append_line(path: str, line: dict[str, Any]) -> OSError | None:
    """Append a line of JSON to a file of a project folder, which never fails a run; return the error if it is lost.

    If this process is killed meanwhile, the line is complete or missing.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # A pipe without a reader is an error, and nothing to wait for.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0), 0o666)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)
    except OSError as error:
        return error
    return None


class TimeAccount:
    """How one process spends its time.

    Only the thread that created it changes the category.

    Args:
        record: the status record of this process.
        path: file for the lines; empty to write none.
        attempt: how often the processes were restarted before.

    Attributes:
        path: file of the lines.
        before: the highest step that earlier processes of this rank reached.
        doing: the current category, an index of `CATEGORIES`.
        decided: whether the category is known; otherwise `doing` is the likely one, and `decide` names the right one.
        since: when the category last changed.
        seconds: seconds of each category until then.
        undecided: seconds until then whose category is not known yet.
        waited: seconds of short waits for data since `since`.
        waited_for_others: seconds of short waits for other processes since `since`.
        due: when a loader reports its next batch.
    """

    __slots__ = (
        "_line_due",
        "_thread",
        "before",
        "decided",
        "doing",
        "due",
        "path",
        "record",
        "seconds",
        "since",
        "undecided",
        "waited",
        "waited_for_others",
    )

    def __init__(self, record: StatusRecord, path: str = "", attempt: int = 0) -> None:
        self.record, self._thread = record, threading.get_ident()
        age = _age()
        self.since = now = monotonic()
        self.path, self.before = "", 0
        self.doing, self.decided = START_UP, True
        self.waited = self.waited_for_others = self.due = self.undecided = 0.0
        # A list, because reading the mapped file takes longer.
        self.seconds = [0.0] * len(CATEGORIES)
        self.seconds[START_UP] = age
        cells = record.cells
        numbers = {
            BEGAN: now - age,
            WALL: time.time() - now,
            DOING: START_UP,
            SINCE: now,
            WAIT: DATA,
            PAUSED: now,
            RESUMED: now,
            SECONDS + START_UP: age,
            ACCOUNT: _STABLE,
        }
        for position in range(ACCOUNT, len(cells)):
            cells[position] = numbers.get(position, 0.0)
        record.append_lines, self._line_due = self.append_if_due, now
        if path:
            self.write_to(path, attempt)

    def write_to(self, path: str, attempt: int) -> None:
        """Append lines to a file from now on, and read there how far earlier processes were; see the arguments."""
        self.path = self.record.account = path
        self.before = self.record.cells[BEFORE] = _reached_before(path)
        line = account_line(self.record.cells)
        append_line(path, {"event": "start", "time": line["time"], "began": line["began"], "attempt": attempt})

    @property
    def marks(self) -> Any:
        """When the last short wait began and when it ended, as a view of the record."""
        return self.record.cells[PAUSED : RESUMED + 1]

    def enter(self, category: int, decided: bool = True) -> None:
        """Charge the time from now on to another category."""
        now, cells, seconds = monotonic(), self.record.cells, self.seconds
        waits = self.waited, self.waited_for_others
        self.waited = self.waited_for_others = 0.0
        spent = now - self.since - waits[0] - waits[1]
        cells[ACCOUNT] = _CHANGING
        seconds[DATA] += waits[0]
        seconds[WAITING] += waits[1]
        if self.decided:
            seconds[self.doing] += spent
        else:
            self.undecided += spent
        for changed in (DATA, WAITING, self.doing):
            cells[SECONDS + changed] = seconds[changed]
        cells[UNDECIDED] = self.undecided
        cells[DOING] = self.doing = category
        self.decided = decided
        cells[SINCE] = self.since = now
        cells[ACCOUNT] = _STABLE

    def decide(self, category: int) -> None:
        """Charge the undecided time to a category, if there is any; the time from now on is charged to it too."""
        if not self.decided:
            self.enter(category, decided=False)
            cells = self.record.cells
            self.seconds[category] += self.undecided
            self.undecided = 0.0
            self.decided = True
            cells[ACCOUNT] = _CHANGING
            cells[SECONDS + category], cells[UNDECIDED] = self.seconds[category], 0.0
            cells[ACCOUNT] = _STABLE

    def reach(self, step: int) -> None:
        """Note that a step of the run was made."""
        self.record.cells[REACHED] = step

    def wait_for_others(self) -> None:
        """Begin a short wait for other processes, until `resume`."""
        cells = self.record.cells
        cells[WAIT] = WAITING
        cells[PAUSED] = monotonic()

    def resume(self) -> bool:
        """End a short wait; False if there was none."""
        cells = self.record.cells
        if cells[PAUSED] <= cells[RESUMED]:
            return False
        now = monotonic()
        if cells[WAIT] == WAITING:
            self.waited_for_others += now - cells[PAUSED]
        else:
            self.waited += now - cells[PAUSED]
        cells[RESUMED], cells[WAIT] = now, DATA
        return True

    def close(self) -> None:
        """Write the last line, at the end of the process."""
        if self.record.append_lines == self.append_if_due:
            self.record.account, self.record.append_lines = "", lambda: None
            self.enter(DOWN)
            if self.path:
                append_line(self.path, {**account_line(self.record.cells), "event": "end"})
            self.record.cells[ACCOUNT] = 0.0

    def append_if_due(self) -> None:
        """Append a line if it is time; the monitor's thread calls this."""
        # No other thread runs during a copy. One in the middle of a change, which is short, is left to the next turn.
        now, cells = monotonic(), tuple(self.record.cells)
        if self.path and now >= self._line_due and cells[ACCOUNT] == _STABLE:
            append_line(self.path, {**account_line(cells, now), "event": "so far"})
            self._line_due = now + min((now - cells[BEGAN]) * _PART, _LEAST_OFTEN)

    def on(self, category: int) -> _Charged:
        """A context manager that charges the time of its block to a category."""
        return _Charged(self, category)

    @property
    def is_mine(self) -> bool:
        """Whether this thread may change the category."""
        return threading.get_ident() == self._thread


class _Charged:
    __slots__ = ("_account", "_before", "_category", "_paused")

    def __init__(self, account: TimeAccount, category: int) -> None:
        self._account, self._category = account, category
        self._before: tuple[int, bool] | None = None

    def __enter__(self) -> None:
        account = self._account
        # Saving includes waiting for other processes, and stays charged to saving.
        if account.is_mine and account.doing not in (SAVING, WAITING):
            self._before = account.doing, account.decided
            self._paused = account.resume()
            account.enter(self._category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            account = self._account
            account.enter(*self._before)
            if self._paused:
                # Only a loader calls code that is charged during a short wait; its wait goes on.
                account.marks[0] = account.since


def account_line(cells: Any, now: float = 0.0) -> dict[str, Any]:
    """The line for the numbers of a record: the seconds by category, and what the process did last.

    Args:
        cells: the numbers.
        now: up to when the process certainly did what it did last; 0 if it may have ended since.
    """
    seconds, doing, since = list(cells[SECONDS:]), int(cells[DOING]), cells[SINCE]
    seconds[doing] += cells[UNDECIDED]
    last = max(cells[PAUSED], cells[RESUMED])
    if last > since:
        # The waits before the last one are unknown, and count as what the process did between them.
        seconds[doing] += last - since
        since = last
        if cells[PAUSED] > cells[RESUMED]:
            doing = int(cells[WAIT])
    if now > since:
        seconds[doing] += now - since
        since = now
    return {
        "event": "left",
        "time": since + cells[WALL],
        "began": cells[BEGAN] + cells[WALL],
        "doing": CATEGORIES[doing],
        "step": int(cells[REACHED]),
        "before": int(cells[BEFORE]),
        "seconds": dict(zip(CATEGORIES, (round(one, 6) for one in seconds), strict=True)),
    }


def close_accounts(folder: str, rank: int | None = None) -> None:
    """Append the last lines of killed processes, from their records in the folder of a launcher.

    Args:
        folder: the folder of the records.
        rank: only those of earlier processes of this rank.
    """
    for content in read_records(folder):
        status = RankStatus.from_json(content.text) if content.text else None
        if rank in (None, content.rank) and status is not None and status.account and not content.is_alive:
            _close(content, status.account)


def _close(content: RecordContent, path: str) -> None:
    # A record that was closed, or that a process damaged, says nothing.
    with contextlib.suppress(ValueError, IndexError, OverflowError):
        if content.cells[ACCOUNT] != 0.0:
            line = account_line(content.cells)
            if not any(one.get("began") == line["began"] and one["event"] == "left" for one in _last_lines(path)):
                append_line(path, line)


def _reached_before(path: str) -> int:
    """The highest step that earlier processes of this file reached."""
    steps = [0]
    for line in _last_lines(path) if path else ():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            # The step during which a process was killed counts, because its time was charged.
            killed_in_step = line["event"] == "left" and line["doing"] in _STEPS
            steps += int(line["step"]) + killed_in_step, int(line["before"])
    return max(steps)


def _last_lines(path: str) -> list[dict[str, Any]]:
    try:
        with open_regular(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            texts = file.read(_TAIL).splitlines()
    except OSError:
        return []
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and "event" in line:
                lines.append(line)
    return lines


def _age() -> float:
    """Seconds since this process was started; 0 if the system does not report it."""
    info = process_info(os.getpid())
    if info is None:
        return 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - info.started / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0
