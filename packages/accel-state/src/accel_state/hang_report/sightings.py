"""Where each process of a run was seen last, and how to tell it in a sentence.

A sighting is made by a process of itself, travels as JSON, and is read by the others when a collective fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from accel_state.hang_report.call_log import CallLog
from accel_state.hang_report.main_thread import Place, main_thread_place
from accel_state.hang_report.progress import PROGRESS
from accel_state.proc import State, process_info, state_of

__all__ = ("Sighting", "absent", "all_told", "describe", "look", "ranks")

_SILENT: Final = 3.0
"""Seconds without news of a process after which it is not said any more that it is where it was seen."""

_KINDS: Final[Mapping[str, Any]] = {"int": int, "str": str, "bool": bool, "float": (int, float)}

_MOST_GROUPS: Final = 16
"""Sentences in one report; with thousands of processes in different places the rest is only counted."""


@dataclass(frozen=True)
class Sighting:
    """One look of a process at itself.

    Args:
        number: of its last collective; 0 when it made none.
        operation: name of that collective.
        called_at: line of the user's code that called it.
        active: whether it is still in that collective.
        now_at: line of the user's code where the main thread is; empty when it was not looked up.
        now_in: the library function that was called there; empty when there is none.
        closely: whether the main thread was looked up.
        left: how it has left the run, such as "without an exception"; empty while it takes part.
        since: when that collective began, where it is still in it, seconds since the epoch; else 0.
        steps: how many steps its optimizer has made.
        steps_per_second: how many it makes in a second; 0 where that is not known.
        step_since: when the last step was made, seconds since the epoch; 0 where there was none.
        activity: what it does instead of training, such as "saving"; empty when it does nothing of the kind.
        activity_at: line of the user's code that began it.
        activity_since: when that was, seconds since the epoch.
        folder: where the run keeps its output, or empty.
        memory: bytes of memory that it uses, where the main thread was looked up; else 0.
        pid: its process id.
        host: its machine, with the namespaces of process ids and of the network.
        time: when it looked, seconds since the epoch.
    """

    number: int
    operation: str
    called_at: str
    active: bool
    now_at: str
    now_in: str
    closely: bool = False
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
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=lambda: _host())
    time: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """The sighting as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Sighting | None:
        """The sighting that `to_json` wrote; None where it did not write the text."""
        try:
            sighting = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        fits = all(isinstance(getattr(sighting, one.name), _KINDS[str(one.type)]) for one in fields(cls))
        return sighting if fits else None

    def where(self) -> str:
        """Where the process is, to be put after "rank 3 is"."""
        if self.active:
            return f"in {self.operation}() at {self.called_at} (call {self.number})"
        before = f"after {self.operation}() at {self.called_at} (call {self.number})"
        before = before if self.number else "before any collective"
        inside = f"in {self.now_in}() at {self.now_at}" if self.now_in else f"at {self.now_at}"
        return f"{inside}, {before}" if self.now_at else before


def look(log: CallLog, closely: bool = False, pinned: Place | None = None) -> Sighting:
    """Where this process is now.

    Args:
        log: its calls.
        closely: look up the line as well where the main thread is.
        pinned: that line, where it is known.
    """
    active = log.active()
    call = active or next(iter(log.recent(1)), None)
    now = pinned or (main_thread_place() if closely else None)
    clock, pace, activity = time.time(), PROGRESS.pace(), PROGRESS.activity()
    info = process_info(os.getpid()) if closely else None
    return Sighting(
        number=call.number if call else 0,
        operation=call.operation if call else "",
        called_at=str(call.location) if call else "",
        active=active is not None,
        now_at=str(now.location) if now else "",
        now_in=now.inside if now else "",
        closely=closely,
        since=clock - active.seconds if active else 0.0,
        steps=pace.steps,
        steps_per_second=pace.per_second,
        step_since=clock - pace.seconds if pace.steps else 0.0,
        activity=activity.name if activity else "",
        activity_at=str(activity.location) if activity else "",
        activity_since=clock - activity.seconds if activity else 0.0,
        folder=PROGRESS.folder,
        memory=info.memory if info else 0,
    )


def all_told(sightings: Mapping[int, Sighting], world_size: int, ages: Mapping[int, float], within: float) -> bool:
    """Whether each process has looked closely within so many seconds, or is known not to answer.

    Args:
        sightings: by rank.
        world_size: number of processes.
        ages: seconds since something new was heard of each of them.
        within: seconds since they were asked.
    """
    return len(sightings) == world_size and all(
        (seen.closely and ages[rank] < within)
        or seen.left
        or ages[rank] > _SILENT + within
        or _state_here(seen) in _HELPLESS
        for rank, seen in sightings.items()
    )


def describe(
    sightings: Mapping[int, Sighting],
    world_size: int,
    ages: Mapping[int, float] | None = None,
    known: Iterable[int] | None = None,
) -> str:
    """Where all processes are, those in the same place in one sentence, the smallest group first.

    Example: "rank 3 is in gather() at eval.py:88 (call 17); ranks 0-2 are in reduce() at train.py:41 (call 17)".

    Args:
        sightings: by rank; ranks that are missing are unknown.
        world_size: number of processes.
        ages: seconds since something new was heard of each of them; by default since it looked at itself.
        known: ranks to tell of; by default all of them.
    """
    now = time.time()
    groups: dict[str, list[int]] = {}
    for rank in range(world_size) if known is None else known:
        seen = sightings.get(rank)
        state = "unknown" if seen is None else _state(seen, now - seen.time if ages is None else ages[rank])
        groups.setdefault(state, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    sentences = [f"{ranks(members)} {'is' if len(members) == 1 else 'are'} {state}" for state, members in ordered]
    more = len(sentences) - _MOST_GROUPS
    return "; ".join(sentences[:_MOST_GROUPS]) + (f"; and {more} other places" if more > 0 else "")


def absent(sightings: Mapping[int, Sighting], world_size: int, ages: Mapping[int, float]) -> list[int]:
    """Ranks that take no part any more, as far as is known: gone, stopped, silent, or never heard of."""
    return [
        rank
        for rank in range(world_size)
        if (seen := sightings.get(rank)) is None or seen.left or ages[rank] > _SILENT or _state_here(seen) in _HELPLESS
    ]


def ranks(members: list[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(members):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(members) == 1 else f"ranks {text}"


def _state(seen: Sighting, age: float) -> str:
    if seen.left:
        after = f", after {seen.operation}() at {seen.called_at} (call {seen.number})" if seen.number else ""
        return f"no longer there: it has left the run {seen.left}{after}"
    here = _state_here(seen)
    last = f"it was last seen {seen.where()}"
    if here == "ended":
        return f"gone (process {seen.pid} has ended); {last}"
    if here == "stopped":
        return f"stopped (process {seen.pid}, by SIGSTOP or a debugger); {last}"
    if age > _SILENT:
        alive = f"alive (process {seen.pid}) but " if here != "elsewhere" else ""
        return f"{alive}silent for {age:.0f} s; {last}"
    return seen.where()


_HELPLESS: Final = frozenset({"ended", "stopped"})


def _state_here(seen: Sighting) -> State | Literal["elsewhere"]:
    """What the operating system says of a process, where it is one of this machine."""
    if seen.host != _host():
        return "elsewhere"
    return state_of(seen.pid) or "elsewhere"


def _host() -> str:
    names = [socket.gethostname()]
    for kind in ("pid", "net"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(names)
