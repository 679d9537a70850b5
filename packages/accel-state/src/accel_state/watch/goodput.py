"""How a run spent its time, from the accounts of its processes and the lines of its launcher.

    summary = read_goodput("project")
    summary.seconds["step"], summary.goodput        # averages over the processes

The time of every process from the start of the run to its end is divided into categories. While the process ran, its
own account has them. Between two of its starts, and after it was killed, the run was down. The rest, such as the end of
a process after its script, is `unattributed`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from accel_state.errors import NotFound, SettingError
from accel_state.proc import state_of
from accel_state.untrusted import dict_of, integer, number, parse_json, read_limited, record, text
from accel_state.watch.record import CATEGORIES
from accel_state.watch.seconds import DOWN, GOODPUT_FOLDER, START_UP, STEP, append_line

__all__ = ("GoodputSummary", "LauncherLines", "RankTime", "read_goodput")

_FILE: Final = re.compile(r"rank_(\d{1,7})\.jsonl")
_LAUNCHER: Final = re.compile(r"launcher_.*\.jsonl")
_MOST_BYTES: Final = 256 * 2**20
_LATEST: Final = 253402300799.0
_MOMENT: Final = number(0, _LATEST)
_SHAPES: Final = {
    "start": record({"event": text(), "time": _MOMENT, "began": _MOMENT, "attempt": integer()}),
    **dict.fromkeys(
        ("so far", "end", "left"),
        record(
            {
                "event": text(),
                "time": _MOMENT,
                "began": _MOMENT,
                "step": integer(),
                "seconds": dict_of(number(0, _LATEST)),
            },
            {"doing": text(), "before": integer()},
        ),
    ),
    "launch": record({"event": text(), "time": _MOMENT, "pid": integer(), "attempt": integer()}),
    "ended": record({"event": text(), "time": _MOMENT, "rank": integer()}),
    "over": record({"event": text(), "time": _MOMENT, "code": integer(-255, 255)}),
}


class LauncherLines:
    """Writes a launcher's lines about a run; a folder that is not writable does not disturb the run.

    Args:
        project_dir: folder of the run.
        node: index of this machine.
    """

    def __init__(self, project_dir: str, node: int = 0) -> None:
        self._path = os.path.join(project_dir, GOODPUT_FOLDER, f"launcher_{node}.jsonl")

    def launch(self, attempt: int) -> OSError | None:
        """Record that the processes are about to start; return the error if the folder is not writable."""
        line = {"event": "launch", "time": time.time(), "pid": os.getpid(), "attempt": attempt}
        return append_line(self._path, line)

    def ended(self, rank: int, moment: float) -> None:
        """Record that a process has ended."""
        append_line(self._path, {"event": "ended", "time": moment, "rank": rank})

    def over(self, code: int) -> None:
        """Record that the run has ended."""
        append_line(self._path, {"event": "over", "time": time.time(), "code": code})


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
    folder = _folder_of(Path(run))
    files = sorted(folder.iterdir())
    damaged = 0
    lines: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        if _FILE.fullmatch(path.name) or _LAUNCHER.fullmatch(path.name):
            lines[path.name], wrong = _read(path)
            damaged += wrong
    launcher = sorted((line for name in lines if _LAUNCHER.fullmatch(name) for line in lines[name]), key=_time)
    ranks = {int(match[1]): lines[name] for name in lines if (match := _FILE.fullmatch(name)) and lines[name]}
    if not ranks:
        raise SettingError(
            f"Cannot read the goodput of the run {str(run)!r}.",
            f"{str(folder)!r} contains no valid line of a goodput account; {damaged} lines are damaged.",
            "Start the run with `accel launch --project_dir`, or with Accelerator(goodput=True).",
        )
    parts = {rank: _parts(found) for rank, found in ranks.items()}
    began = min(one.began for several in parts.values() for one in several)
    began = min([began, *(line["time"] for line in launcher if line["event"] == "launch")])
    running = _is_running(launcher)
    for rank, several in parts.items():
        ends = [line["time"] for line in launcher if line["event"] == "ended" and line["rank"] == rank]
        _end_all(several, ends, running)
    ended = max(one.ended for several in parts.values() for one in several)
    ended = max([ended, *(line["time"] for line in launcher)])
    ended = max(ended, time.time()) if running else ended
    times = [_rank_time(rank, several, began, ended) for rank, several in sorted(parts.items())]
    return GoodputSummary(str(folder.parent), began, ended, running, times, damaged)


def _folder_of(run: Path) -> Path:
    asked = f"Cannot read the goodput of the run {str(run)!r}."
    if not run.is_dir():
        raise NotFound(asked, "There is no such folder.", "Name the run's project_dir.")
    for folder in (run / GOODPUT_FOLDER, run):
        if folder.is_dir() and any(_FILE.fullmatch(one.name) for one in folder.iterdir()):
            return folder
    raise NotFound(
        asked,
        f"There is no goodput account in {str(run / GOODPUT_FOLDER)!r}.",
        "Start the run with `accel launch --project_dir`, or with Accelerator(goodput=True).",
    )


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The valid lines of a file, and the number of damaged ones."""
    found, damaged = [], 0
    for line in read_limited(path, _MOST_BYTES).splitlines():
        try:
            read = parse_json(line)
            shape = _SHAPES[read["event"]]
            if shape(read):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            damaged += 1
        else:
            found.append(read)
    return found, damaged


def _time(line: Mapping[str, Any]) -> float:
    return float(line["time"])


@dataclass
class _Part:
    """One start of a process.

    Args:
        began: when the process started.
        ended: when it ended, as far as is known.
        seconds: its account, up to `until`.
        until: when the account was last written.
        doing: the category at that time.
        step: the step that it reached.
        closed: whether the process closed its account by itself.
    """

    began: float
    ended: float
    seconds: dict[str, float] = field(default_factory=dict)
    until: float = 0.0
    doing: str = CATEGORIES[START_UP]
    step: int = 0
    closed: bool = False


def _parts(lines: Iterable[Mapping[str, Any]]) -> list[_Part]:
    """The starts of a process, in order."""
    parts: dict[float, _Part] = {}
    for line in lines:
        part = parts.setdefault(line["began"], _Part(line["began"], line["time"]))
        if part.closed or line["time"] < part.until:
            continue
        part.ended = part.until = line["time"]
        if line["event"] != "start":
            part.seconds = {name: float(line["seconds"].get(name, 0.0)) for name in CATEGORIES}
            part.step, part.closed = line["step"], line["event"] == "end"
            part.doing = line.get("doing", part.doing)
    return sorted(parts.values(), key=lambda part: part.began)


def _end_all(parts: Sequence[_Part], ends: Sequence[float], running: bool) -> None:
    """Charge the time from the last line of each start until the process was killed, or until now."""
    for index, part in enumerate(parts):
        following = parts[index + 1].began if index + 1 < len(parts) else _LATEST
        if part.closed:
            continue
        seen = next((moment for moment in ends if part.until <= moment <= following), None)
        if seen is None and running and following == _LATEST:
            seen = time.time()
        if seen is not None:
            part.seconds = part.seconds or dict.fromkeys(CATEGORIES, 0.0)
            doing = part.doing if part.doing in part.seconds else CATEGORIES[STEP]
            part.seconds[doing] += seen - part.until
            part.ended = seen


def _is_running(launcher: Sequence[Mapping[str, Any]]) -> bool:
    last = launcher[-1] if launcher else None
    launches = [line for line in launcher if line["event"] == "launch"]
    if last is None or last["event"] == "over" or not launches:
        return False
    return state_of(launches[-1]["pid"]) == "alive"


def _rank_time(rank: int, parts: Sequence[_Part], began: float, ended: float) -> RankTime:
    seconds = {name: sum(part.seconds.get(name, 0.0) for part in parts) for name in CATEGORIES}
    # Before the first start the time counts as start-up.
    seconds[CATEGORIES[START_UP]] += parts[0].began - began
    unattributed = 0.0
    until = parts[0].began
    for part in parts:
        seconds[CATEGORIES[DOWN]] += max(part.began - until, 0.0)
        until = max(part.ended, until)
        unattributed += max(part.ended - part.began - sum(part.seconds.values()), 0.0)
    if parts[-1].closed:
        # Its script was over, and the run still ended: nothing is down.
        unattributed += max(ended - until, 0.0)
    else:
        seconds[CATEGORIES[DOWN]] += max(ended - until, 0.0)
    return RankTime(rank, len(parts), max(part.step for part in parts), seconds, unattributed)
