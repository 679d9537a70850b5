"""Where each process of a run was seen last, and how to tell it in a sentence.

A sighting is made by a process of itself, travels as JSON, and is read by the others when a collective fails.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from accel_state.hang_report.call_log import CallLog
from accel_state.hang_report.main_thread import main_thread_place

__all__ = ("Sighting", "all_told", "describe", "look", "ranks")

_SILENT: Final = 5.0
"""Seconds without news after which it is told how old the news is."""

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
        left: whether it takes no part any more, because its state was given up or it ends.
        pid: its process id.
        host: its machine and process-id namespace.
        time: when it looked, seconds since the epoch.
    """

    number: int
    operation: str
    called_at: str
    active: bool
    now_at: str
    now_in: str
    left: bool = False
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=lambda: _host())
    time: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """The sighting as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Sighting:
        """The sighting that `to_json` wrote."""
        return cls(**json.loads(text))

    def where(self) -> str:
        """Where the process is, to be put after "rank 3 is"."""
        if self.active and not self.left:
            return f"in {self.operation}() at {self.called_at} (call {self.number})"
        inside = f"in {self.now_in}() at {self.now_at}" if self.now_in else f"at {self.now_at}"
        if self.left:
            inside = "no longer taking part"
        before = "before any collective"
        if self.number:
            before = f"after {self.operation}() at {self.called_at} (call {self.number})"
        return f"{inside}, {before}" if self.now_at or self.left else before


def look(log: CallLog, closely: bool = False) -> Sighting:
    """Where this process is now.

    Args:
        log: its calls.
        closely: look up the line as well where the main thread is.
    """
    call = log.last()
    now = main_thread_place() if closely else None
    return Sighting(
        number=call.number if call else 0,
        operation=call.operation if call else "",
        called_at=str(call.location) if call else "",
        active=log.active,
        now_at=str(now.location) if now else "",
        now_in=now.inside if now else "",
    )


def all_told(sightings: Mapping[int, Sighting], world_size: int) -> bool:
    """Whether each process is in a collective, has told its line, or takes no part any more."""
    return len(sightings) == world_size and all(
        seen.active or seen.now_at or seen.left or _is_gone(seen) for seen in sightings.values()
    )


def describe(sightings: Mapping[int, Sighting], world_size: int) -> str:
    """Where all processes are, those in the same place in one sentence, the smallest group first.

    Example: "rank 3 is in gather() at eval.py:88 (call 17); ranks 0-2 are in reduce() at train.py:41 (call 17)".
    """
    groups: dict[str, list[int]] = {}
    for rank in range(world_size):
        seen = sightings.get(rank)
        groups.setdefault("unknown" if seen is None else _state(seen), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    sentences = [f"{ranks(members)} {'is' if len(members) == 1 else 'are'} {state}" for state, members in ordered]
    more = len(sentences) - _MOST_GROUPS
    return "; ".join(sentences[:_MOST_GROUPS]) + (f"; and {more} other places" if more > 0 else "")


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


def _state(seen: Sighting) -> str:
    if _is_gone(seen):
        return f"gone (process {seen.pid} has ended); it was last seen {seen.where()}"
    age = time.time() - seen.time
    return seen.where() + (f", by the last news, {age:.0f} s old" if age > _SILENT else "")


def _is_gone(seen: Sighting) -> bool:
    return seen.host == _host() and _has_ended(seen.pid)


def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def _has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended, also when its parent has not taken note yet."""
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True
    if os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
    return False
