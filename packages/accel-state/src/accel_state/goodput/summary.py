"""How the time of a run divides, from the accounts of its processes and what its launcher saw.

    summary = read_goodput("project")
    summary.seconds["step"], summary.goodput        # of an average process

Every process has spent the time from the start of the run to its end on something. While it ran, its own account says
on what; between two of its starts, and after its end, the run was down. What no account covers is `unattributed`.
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
from accel_state.goodput.account import CATEGORIES, DOWN, GOODPUT_FOLDER, START_UP, STEP, LiveAccount, append_line
from accel_state.proc import state_of
from accel_state.untrusted import dict_of, integer, number, parse_json, read_limited, record, text

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
            {"doing": text()},
        ),
    ),
    "launch": record({"event": text(), "time": _MOMENT, "pid": integer(), "attempt": integer()}),
    "ended": record({"event": text(), "time": _MOMENT, "rank": integer()}),
    "over": record({"event": text(), "time": _MOMENT, "code": integer(-255, 255)}),
}


class LauncherLines:
    """What a launcher writes of a run; a folder that cannot be written does not disturb it.

    Args:
        project_dir: folder of the run.
        node: which of the machines this is.
    """

    def __init__(self, project_dir: str, node: int = 0) -> None:
        self._path = os.path.join(project_dir, GOODPUT_FOLDER, f"launcher_{node}.jsonl")

    def launch(self, attempt: int) -> OSError | None:
        """The processes are about to be started; returns why the folder cannot be written."""
        return self._append({"event": "launch", "time": time.time(), "pid": os.getpid(), "attempt": attempt})

    def ended(self, rank: int, moment: float) -> None:
        """A process was seen to have ended."""
        self._append({"event": "ended", "time": moment, "rank": rank})

    def over(self, code: int) -> None:
        """The run is over."""
        self._append({"event": "over", "time": time.time(), "code": code})

    def _append(self, line: dict[str, Any]) -> OSError | None:
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            append_line(self._path, line)
        except OSError as error:
            return error
        return None


@dataclass(frozen=True)
class RankTime:
    """The time of one process, over all its starts.

    Args:
        rank: which one.
        starts: how often it was started.
        step: steps of the run that it reached.
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
    """How the time of a run divides.

    Args:
        folder: of the run.
        began: when it was started, seconds since 1970.
        ended: when it ended, or now where it still runs.
        running: whether it still runs.
        ranks: the time of each process.
        damaged: lines that could not be read and were left out.
    """

    folder: str
    began: float
    ended: float
    running: bool
    ranks: Sequence[RankTime]
    damaged: int = 0

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
        """The part of the time that went into steps that count, from 0 to 1."""
        return self.seconds[CATEGORIES[STEP]] / self.wall if self.wall else 0.0

    @property
    def restarts(self) -> int:
        """How often the processes were started again."""
        return max(one.starts for one in self.ranks) - 1


def read_goodput(run: str | os.PathLike[str]) -> GoodputSummary:
    """The summary of a run.

    Args:
        run: its folder (`project_dir`), or that of the accounts inside.

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
            f"Cannot read where the time of the run {str(run)!r} went.",
            f"{str(folder)!r} has no valid line of a goodput account; {damaged} are damaged.",
            "Start the run with `accel launch --project_dir`, or with Accelerator(goodput=True).",
        )
    parts = {rank: _parts(found, LiveAccount.read(folder / f"rank_{rank}.live")) for rank, found in ranks.items()}
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
    asked = f"Cannot read where the time of the run {str(run)!r} went."
    if not run.is_dir():
        raise NotFound(asked, "There is no such folder.", "Give the project_dir of the run.")
    for folder in (run / GOODPUT_FOLDER, run):
        if folder.is_dir() and any(_FILE.fullmatch(one.name) for one in folder.iterdir()):
            return folder
    raise NotFound(
        asked,
        f"It has no goodput account of any process in {str(run / GOODPUT_FOLDER)!r}.",
        "Start the run with `accel launch --project_dir`, or with Accelerator(goodput=True).",
    )


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The sound lines of a file, and how many others it has."""
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
        began: when.
        ended: when it ended, as far as is known.
        seconds: its account, up to `until`.
        until: when the account was written last.
        doing: what it did then.
        step: that it reached.
        closed: whether the process closed its account by itself.
    """

    began: float
    ended: float
    seconds: dict[str, float] = field(default_factory=dict)
    until: float = 0.0
    doing: str = CATEGORIES[START_UP]
    step: int = 0
    closed: bool = False


def _parts(lines: Iterable[Mapping[str, Any]], live: LiveAccount | None) -> list[_Part]:
    """The starts of a process, in their order."""
    parts: dict[float, _Part] = {}
    for line in (*lines, *([live.line()] if live is not None else ())):
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
    """Charge what each start did after its last line until it was killed, or until now."""
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
    # Before the first start it is about to be started; later, and where it has closed its account, the run is down.
    seconds[CATEGORIES[START_UP]] += parts[0].began - began
    unattributed = 0.0
    until = parts[0].began
    for part in parts:
        seconds[CATEGORIES[DOWN]] += max(part.began - until, 0.0)
        until = max(part.ended, until)
        unattributed += max(part.ended - part.began - sum(part.seconds.values()), 0.0)
    seconds[CATEGORIES[DOWN]] += max(ended - until, 0.0)
    return RankTime(rank, len(parts), max(part.step for part in parts), seconds, unattributed)
