"""How a run spent its time: the lines that its processes and its launcher write, and the summary of them.

    keep_account("project/goodput/rank_0.jsonl")    # a process: the monitor's thread appends lines from now on
    summary = read_goodput("project")
    summary.seconds["step"], summary.goodput        # averages over the processes

The seconds by category are numbers of the status record of each process, which are those of this moment also after the
process was killed. The monitor's thread appends them as lines of JSON to a file of the project, at intervals that grow
with the length of the run: nothing there is mapped, and a disk that is full, or a file that somebody truncates, costs
lines and never the run. When a process was killed, its launcher appends the last line from the record, or else the next
process of that rank does (`close_accounts`).

The time of every process from the start of the run to its end is divided into categories. Between two of its starts,
and after it was killed, the run was down. The rest, such as the end of a process after its script, is `unattributed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from accel_state.errors import NotFound, SettingError
from accel_state.proc import process_info, state_of
from accel_state.untrusted import dict_of, integer, number, open_regular, parse_json, read_limited, record, text
from accel_state.watch.record import (
    BEFORE,
    BEGAN,
    CATEGORIES,
    DOING,
    DOWN,
    LIKELY,
    LOADED,
    SECONDS,
    START_UP,
    STATUS_RECORD,
    STEP,
    STEPS,
    UNDECIDED,
    UNDER_WAY,
    WALL,
)
from accel_state.watch.status import RankStatus, read_records

__all__ = (
    "GOODPUT_FOLDER",
    "GoodputSummary",
    "RankTime",
    "account_history",
    "account_line",
    "append_line",
    "close_account",
    "close_accounts",
    "keep_account",
    "launcher_line",
    "memory_in_use",
    "pause_after",
    "read_goodput",
)

GOODPUT_FOLDER: Final = "goodput"
"""Folder of the lines, inside the run's folder."""

# ---------------------------------------------------------------------- writing lines

_TAIL_BYTES: Final = 64 * 1024
"""Bytes at the end of a file in which its last lines are looked for."""

_MAX_LINE_INTERVAL_S: Final = 60.0
_LINE_INTERVAL_SHARE: Final = 1 / 200
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


def launcher_line(project_dir: str, event: str) -> OSError | None:
    """Append a line of the launcher: its processes are about to start ("launch"), or the run has ended ("over")."""
    line = {"event": event, "time": time.time(), "pid": os.getpid()}
    return append_line(os.path.join(project_dir, GOODPUT_FOLDER, "launcher_0.jsonl"), line)


def account_line(cells: Sequence[float], event: str, now: float = 0.0) -> dict[str, Any]:
    """The line for the numbers of a record: the seconds by category, and what the process did last.

    Args:
        cells: the numbers.
        event: "so far", "end", or "left" for a process that was killed.
        now: up to when the process did what it did last, by the monotonic clock; 0 if that is not known.
    """
    seconds, doing = list(cells[SECONDS : SECONDS + UNDECIDED]), int(cells[DOING])
    since = cells[BEGAN] + sum(cells[SECONDS:])
    seconds[int(cells[LIKELY])] += cells[SECONDS + UNDECIDED]
    doing = int(cells[LIKELY]) if doing == UNDECIDED else doing
    seconds[doing] += max(now - since, 0.0)
    step = int(cells[LOADED] + cells[STEPS])
    begun = int(cells[UNDER_WAY]) if cells[SECONDS + UNDECIDED] or cells[DOING] == UNDECIDED else 0
    return {
        "event": event,
        "time": max(now, since) + cells[WALL],
        "began": cells[BEGAN] + cells[WALL],
        "doing": CATEGORIES[doing],
        "step": step,
        "begun": max(step, begun, int(cells[BEFORE])),
        "seconds": dict(zip(CATEGORIES, (round(one, 6) for one in seconds), strict=True)),
    }


def memory_in_use() -> dict[str, int]:
    """The bytes of this process, and of its tensors on a device that has its own memory, for a line of the account."""
    info, device = process_info(os.getpid()), None
    with contextlib.suppress(Exception):
        # A device that fails reports that elsewhere.
        device = STATUS_RECORD.device_memory()
    return {
        **({} if info is None else {"memory": info.memory}),
        **({} if device is None else {"device_memory": device}),
    }


def account_history(run: str | os.PathLike[str]) -> dict[int, list[dict[str, Any]]]:
    """The lines of each process, by rank, in the order of their time; empty if the run has no account."""
    folder = Path(run, GOODPUT_FOLDER)
    history: dict[int, list[dict[str, Any]]] = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if match := _ACCOUNT_FILE.fullmatch(path.name):
                lines = _valid(read_limited(path, _MAX_ACCOUNT_BYTES).splitlines(), _PROCESS_LINE)
                history[int(match[1])] = sorted(lines, key=_time)
    return history


def pause_after(cells: Sequence[float], now: float) -> float:
    """Seconds from a line to the next one."""
    return min((now - cells[BEGAN]) * _LINE_INTERVAL_SHARE, _MAX_LINE_INTERVAL_S)


def keep_account(path: str) -> None:
    """Append the account of this process to a file from now on, and learn there how far earlier processes were."""
    # The step during which a process was killed counts, because its time was charged.
    STATUS_RECORD.cells[BEFORE] = max((line["begun"] for line in _last_lines(path)), default=0)
    append_line(path, account_line(STATUS_RECORD.cells, "so far"))
    STATUS_RECORD.account = path


def close_account() -> None:
    """Write the last line, at the end of this process."""
    path, STATUS_RECORD.account = STATUS_RECORD.account, ""
    STATUS_RECORD.enter(DOWN)
    if path:
        append_line(path, account_line(STATUS_RECORD.cells, "end"))
    STATUS_RECORD.cells[BEGAN] = 0.0


def close_accounts(folder: str, ended: Mapping[int, float] | None = None, rank: int | None = None) -> None:
    """Append the last lines of killed processes, from their records in the folder of a launcher.

    Args:
        folder: the folder of the records.
        ended: when processes were seen to have ended, by rank and by the wall clock.
        rank: only those of earlier processes of this rank.
    """
    for content in read_records(folder):
        status = RankStatus.from_json(content.text) if content.text else None
        if rank in (None, content.rank) and status is not None and status.account and not content.is_alive:
            # A record that was closed, or that a process damaged, says nothing.
            with contextlib.suppress(ValueError, IndexError, OverflowError):
                if content.cells[BEGAN]:
                    _close(content.cells, status.account, (ended or {}).get(content.rank, 0.0))


def _close(cells: Sequence[float], path: str, ended: float) -> None:
    line = account_line(cells, "left", ended - cells[WALL])
    if not any((one["began"], one["event"]) == (line["began"], "left") for one in _last_lines(path)):
        append_line(path, line)


def _last_lines(path: str) -> list[dict[str, Any]]:
    try:
        with open_regular(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            return list(_valid(file.read(_TAIL_BYTES).splitlines(), _PROCESS_LINE))
    except OSError:
        return []


# ---------------------------------------------------------------------- reading them

_ACCOUNT_FILE: Final = re.compile(r"rank_(\d{1,7})\.jsonl")
_LAUNCHER_FILE: Final = re.compile(r"launcher_.*\.jsonl")
_MAX_ACCOUNT_BYTES: Final = 256 * 2**20
_MAX_TIMESTAMP: Final = 253402300799.0
_TIMESTAMP: Final = number(0, _MAX_TIMESTAMP)
_PROCESS_LINE: Final = record(
    {
        "event": text("so far|end|left"),
        "time": _TIMESTAMP,
        "began": _TIMESTAMP,
        "doing": text(),
        "step": integer(),
        "begun": integer(),
        "seconds": dict_of(_TIMESTAMP),
    }
)
_LAUNCHER_LINE: Final = record({"event": text("launch|over"), "time": _TIMESTAMP, "pid": integer()})


@dataclass(frozen=True)
class RankTime:
    """The time of one process, over all its starts.

    Args:
        rank: rank of the process.
        starts: how often it was started.
        step: the highest step of the run that it reached.
        seconds: by category of `CATEGORIES`.
        unattributed: seconds that no account covers.
    """

    rank: int
    starts: int
    step: int
    seconds: Mapping[str, float]
    unattributed: float


@dataclass(frozen=True)
class GoodputSummary:
    """How a run spent its time.

    Args:
        folder: the run's folder.
        began: when it was started, seconds since 1970.
        ended: when it ended, or now if it still runs.
        running: whether it still runs.
        ranks: the time of each process.
        damaged_lines: number of lines that could not be read and were left out.
    """

    folder: str
    began: float
    ended: float
    running: bool
    ranks: Sequence[RankTime]
    damaged_lines: int = 0

    @property
    def wall(self) -> float:
        """Seconds from the start of the run to its end."""
        return max(self.ended - self.began, 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of an average process, by category."""
        return {name: sum(one.seconds[name] for one in self.ranks) / len(self.ranks) for name in CATEGORIES}

    @property
    def unattributed(self) -> float:
        """Seconds of an average process that no account covers."""
        return sum(one.unattributed for one in self.ranks) / len(self.ranks)

    @property
    def goodput(self) -> float:
        """The fraction of the time that was spent on steps that count, from 0 to 1."""
        return self.seconds[CATEGORIES[STEP]] / self.wall if self.wall else 0.0

    @property
    def restarts(self) -> int:
        """How often the processes were restarted."""
        return max(one.starts for one in self.ranks) - 1


def read_goodput(run: str | os.PathLike[str]) -> GoodputSummary:
    """The summary of a run.

    Args:
        run: the run's folder (`project_dir`), or the folder of the accounts in it.

    Raises:
        NotFound: the folder does not exist, or has no accounts.
        SettingError: none of its lines can be read.
    """
    failure = f"Cannot read the goodput of the run {str(run)!r}."
    remedy = "Start the run with `accel launch --project_dir`, or with Accelerator(goodput=True)."
    if not Path(run).is_dir():
        raise NotFound(failure, "There is no such folder.", "Name the run's project_dir.")
    folder = Path(run, GOODPUT_FOLDER) if Path(run, GOODPUT_FOLDER).is_dir() else Path(run)
    accounts = {int(match[1]): path for path in folder.iterdir() if (match := _ACCOUNT_FILE.fullmatch(path.name))}
    if not accounts:
        raise NotFound(failure, f"There is no goodput account in {str(Path(run, GOODPUT_FOLDER))!r}.", remedy)
    damaged = 0

    def lines_of(path: Path, shape: Any) -> list[dict[str, Any]]:
        nonlocal damaged
        texts = read_limited(path, _MAX_ACCOUNT_BYTES).splitlines()
        lines = list(_valid(texts, shape))
        damaged += len(texts) - len(lines)
        return lines

    launchers = [path for path in folder.iterdir() if _LAUNCHER_FILE.fullmatch(path.name)]
    launcher = sorted((line for path in launchers for line in lines_of(path, _LAUNCHER_LINE)), key=_time)
    ranks = {rank: _last_of_starts(lines_of(path, _PROCESS_LINE)) for rank, path in sorted(accounts.items())}
    ranks = {rank: starts for rank, starts in ranks.items() if starts}
    if not ranks:
        why = f"{str(folder)!r} contains no valid line of a goodput account; {damaged} lines are damaged."
        raise SettingError(failure, why, remedy)
    running = bool(launcher) and launcher[-1]["event"] == "launch" and state_of(launcher[-1]["pid"]) == "alive"
    began = min([line["began"] for starts in ranks.values() for line in starts] + [_time(line) for line in launcher])
    moments = [_time(line) for starts in ranks.values() for line in starts] + [_time(line) for line in launcher]
    ended = max(*moments, time.time() if running else 0.0)
    times = [_rank_time(rank, starts, began, ended, running) for rank, starts in ranks.items()]
    return GoodputSummary(str(folder.parent), began, ended, running, times, damaged)


def _valid(texts: Iterable[bytes], shape: Any) -> Iterator[dict[str, Any]]:
    for line in texts:
        with contextlib.suppress(ValueError):
            yield parse_json(line, shape)


def _time(line: Mapping[str, Any]) -> float:
    return float(line["time"])


def _last_of_starts(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The newest line of each start of a process, in order; nothing follows the line of its end."""
    starts: dict[float, Mapping[str, Any]] = {}
    for line in lines:
        before = starts.get(line["began"])
        if before is None or (before["event"] != "end" and _time(before) <= _time(line)):
            starts[line["began"]] = line
    return [line for _, line in sorted(starts.items())]


def _rank_time(rank: int, starts: Sequence[Mapping[str, Any]], began: float, ended: float, running: bool) -> RankTime:
    seconds = {name: sum(float(line["seconds"].get(name, 0.0)) for line in starts) for name in CATEGORIES}
    # Before the first start the time counts as start-up.
    until = starts[0]["began"]
    seconds[CATEGORIES[START_UP]] += until - began
    unattributed = 0.0
    for line in starts:
        seconds[CATEGORIES[DOWN]] += max(line["began"] - until, 0.0)
        until = max(_time(line), until)
        unattributed += max(_time(line) - line["began"] - sum(line["seconds"].values()), 0.0)
    rest = max(ended - until, 0.0)
    if starts[-1]["event"] == "end":
        # Its script was over, and the run still ended: nothing is down.
        unattributed += rest
    elif running and starts[-1]["event"] == "so far" and starts[-1]["doing"] in seconds:
        # It goes on with what it did.
        seconds[starts[-1]["doing"]] += rest
    else:
        seconds[CATEGORIES[DOWN]] += rest
    return RankTime(rank, len(starts), max(line["step"] for line in starts), seconds, unattributed)
