"""How far a process has come, and what it does: stored by the training code, read by the thread of its monitor.

The training code stores its progress in plain attributes, which costs a step less than a microsecond. The thread of the
monitor reads them twice a second and computes the steps per second. The number of steps and the ids of samples are also
in files, which outlive the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from accel_state.hang_report.activity import Activity, Pace

__all__ = (
    "PROGRESS",
    "STATUS_FOLDER",
    "TrainingProgress",
    "read_run_step",
    "read_samples",
    "sample_file",
)

STATUS_FOLDER: Final = "ACCEL_STATUS_FOLDER"
"""Variable that names the folder of the files; without it, processes write none."""

_MOST_MOMENTS: Final = 32
"""Moments at which a new step was seen, from which the pace follows: 16 seconds, or as many steps."""


class TrainingProgress:
    """The progress of one process.

    Attributes:
        steps: steps of the optimizer that has made most, since the process was started.
        loaded: steps of the run that this process did not make, since it loaded a checkpoint of them.
        shared: `loaded` and `steps`, where the launcher reads them after this process was killed.
        samples: returns the ids of the samples of the batch that is trained on, or of the batch with a number in the
            epoch; empty where they are not known.
        folder: where the run keeps its output, or empty.
        device_memory: returns the bytes that this process holds on its device; None where nothing counts them.
    """

    __slots__ = ("_activity", "_moments", "device_memory", "folder", "loaded", "samples", "shared", "steps")

    def __init__(self) -> None:
        self.steps = self.loaded = 0
        self.shared: MutableSequence[int] = array("q", (0, 0))
        self.samples: Callable[[int | None], list[str]] = lambda read: []
        self.folder = ""
        self.device_memory: Callable[[], int | None] = lambda: None
        # Replaced as a whole, because the thread of the monitor reads it at any moment.
        self._activity: tuple[str, CodeType, int, float] | None = None
        self._moments: deque[tuple[float, int]] = deque(maxlen=_MOST_MOMENTS)

    def writes_to(self, folder: str | os.PathLike[str]) -> None:
        """Record the folder of the run; the first one counts."""
        self.folder = self.folder or os.path.abspath(folder)

    @property
    def run_step(self) -> int:
        """Steps of the run, over all its restarts, that led to the state of this process."""
        return self.loaded + self.steps

    def went_back_to(self, step: int) -> None:
        """Record that a checkpoint was loaded that the run saved after so many steps."""
        self.loaded = self.shared[0] = step - self.steps

    def share(self, folder: str, rank: int) -> None:
        """Keep the numbers of steps in a file from now on, which outlives the process."""
        with contextlib.suppress(OSError):
            self.shared = _mapped(os.path.join(folder, f"rank{rank}.steps"))
            self.shared[0], self.shared[1] = self.loaded, self.steps

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record for the length of a block what this process does."""
        # A process that runs alone has no monitor, and does without this module.
        from accel_state.hang_report.call_log import caller

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
        from accel_state.hang_report.activity import Activity
        from accel_state.hang_report.call_log import locate

        name, code, line, begun = activity
        return Activity(name, locate(code.co_filename, line), time.monotonic() - begun)

    def pace(self) -> Pace:
        """How quickly the process trains, by the steps that earlier calls have seen."""
        from accel_state.hang_report.activity import Pace

        now, steps = time.monotonic(), self.steps
        if not steps:
            return Pace(0, 0.0, 0.0)
        if not self._moments or self._moments[-1][1] != steps:
            self._moments.append((now, steps))
        (first, fewer), (last, more) = self._moments[0], self._moments[-1]
        return Pace(steps, (more - fewer) / (last - first) if last > first else 0.0, now - last)


PROGRESS: Final = TrainingProgress()
"""That of this process."""

_STEPS: Final = struct.Struct("qq")


def _mapped(path: str) -> MutableSequence[int]:
    import mmap

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(file, _STEPS.size)
        return memoryview(mmap.mmap(file, _STEPS.size)).cast("q")  # type: ignore[return-value]
    finally:
        os.close(file)


def read_run_step(folder: str, rank: int) -> int:
    """Steps of the run at which a process is, or was when it ended; 0 where it has written none."""
    try:
        with open(os.path.join(folder, f"rank{rank}.steps"), "rb") as file:
            return sum(_STEPS.unpack(file.read(_STEPS.size)))
    except (OSError, struct.error):
        return 0


_MOST_SAMPLE_BYTES: Final = 2048


def sample_file(folder: str, rank: int) -> Callable[[str], None] | None:
    """What keeps a text about samples where the launcher reads it after this process was killed; None if it cannot."""
    import mmap

    try:
        file = os.open(os.path.join(folder, f"rank{rank}.samples"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(file, _MOST_SAMPLE_BYTES)
            mapped = mmap.mmap(file, _MOST_SAMPLE_BYTES)
        finally:
            os.close(file)
    except OSError:
        return None

    def write(text: str) -> None:
        content = text.encode()
        if len(content) < _MOST_SAMPLE_BYTES:
            mapped[: len(content) + 1] = content + b"\0"

    return write


def read_samples(folder: str, rank: int) -> list[str]:
    """Ids of the samples that a process of a restarted run has read last; empty where it has written none."""
    try:
        with open(os.path.join(folder, f"rank{rank}.samples"), "rb") as file:
            found = json.loads(file.read(_MOST_SAMPLE_BYTES).partition(b"\0")[0])
    except (OSError, ValueError):
        return []
    return [str(sample) for sample in found] if isinstance(found, list) else []
