"""What this process does beside its collectives: at which step it is, and whether it saves, loads or waits to begin.

What trains stores it in plain attributes, which costs a step less than a microsecond. The thread that reports reads
them twice a second and works out how many steps that is in a second.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Final, NamedTuple

from accel_state.hang_report.call_log import Location, caller, locate

__all__ = ("PROGRESS", "Activity", "Pace", "Progress")

_KEPT: Final = 32
"""Moments at which a new step was seen, from which the pace follows: 16 seconds, or as many steps."""


class Activity(NamedTuple):
    """What a process does instead of training.

    Args:
        name: such as "saving".
        location: line of the user's code that began it.
        seconds: how long it takes by now.
    """

    name: str
    location: Location
    seconds: float


class Pace(NamedTuple):
    """How quickly a process trains.

    Args:
        steps: steps that its optimizer has made.
        per_second: steps in a second, as of late; 0 before two were seen.
        seconds: since the last step was seen; 0 before there was one.
    """

    steps: int
    per_second: float
    seconds: float


class Progress:
    """The progress of one process.

    Attributes:
        steps: steps of the optimizer that has made most, since the process was started.
        folder: where the run keeps its output, or empty.
    """

    __slots__ = ("_activity", "_seen", "folder", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.folder = ""
        # Replaced as a whole, because the thread that reports reads it at any moment.
        self._activity: tuple[str, CodeType, int, float] | None = None
        self._seen: deque[tuple[float, int]] = deque(maxlen=_KEPT)

    def writes_to(self, folder: str | os.PathLike[str]) -> None:
        """Take note of the folder of the run, the first one that is given."""
        self.folder = self.folder or os.path.abspath(folder)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Say for the length of a block what this process does."""
        before = self._activity
        code, line = caller()
        self._activity = (name, code, line, time.monotonic())
        try:
            yield
        finally:
            self._activity = before

    def activity(self) -> Activity | None:
        """What the process does instead of training."""
        activity = self._activity
        if activity is None:
            return None
        name, code, line, begun = activity
        return Activity(name, locate(code.co_filename, line), time.monotonic() - begun)

    def pace(self) -> Pace:
        """How quickly the process trains, by what was seen at earlier calls."""
        now, steps = time.monotonic(), self.steps
        if not steps:
            return Pace(0, 0.0, 0.0)
        if not self._seen or self._seen[-1][1] != steps:
            self._seen.append((now, steps))
        (first, fewer), (last, more) = self._seen[0], self._seen[-1]
        return Pace(steps, (more - fewer) / (last - first) if last > first else 0.0, now - last)


PROGRESS: Final = Progress()
"""That of this process."""
