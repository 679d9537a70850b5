"""The progress and the activity of a process: written by the training code, read by the monitor's thread.

The training code writes its progress to plain attributes, which takes less than a microsecond per step. The monitor's
thread reads them twice a second and computes the steps per second. The number of steps and the ids of samples are also
written to files, which outlive the process.
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
"""Variable with the folder of the files; without it, processes write none."""

_MOST_MOMENTS: Final = 32
"""Number of times of recent steps from which the pace is computed: 16 seconds, or as many steps."""


class TrainingProgress:
    """The progress of one process.

    Attributes:
        steps: steps since the process was started, of the optimizer with the most steps.
        loaded: steps of the run before the checkpoint that this process has loaded.
        shared: `loaded` and `steps` in a file, which the launcher can read after this process was killed.
        samples: returns the ids of the samples of the current batch, or of the batch with a number in the epoch; empty
            if they are not known.
        folder: folder with the run's output, or empty.
        device_memory: returns the bytes that this process uses on its device; None if they are not counted.
    """

    __slots__ = ("_activity", "_moments", "device_memory", "folder", "loaded", "samples", "shared", "steps")

    def __init__(self) -> None:
        self.steps = self.loaded = 0
        self.shared: MutableSequence[int] = array("q", (0, 0))
        self.samples: Callable[[int | None], list[str]] = lambda read: []
        self.folder = ""
        self.device_memory: Callable[[], int | None] = lambda: None
        # Replaced as a whole, because the monitor's thread may read it at any moment.
        self._activity: tuple[str, CodeType, int, float] | None = None
        self._moments: deque[tuple[float, int]] = deque(maxlen=_MOST_MOMENTS)

    def writes_to(self, folder: str | os.PathLike[str]) -> None:
        """Record the folder of the run; only the first call has an effect."""
        self.folder = self.folder or os.path.abspath(folder)

    @property
    def run_step(self) -> int:
        """Number of steps of the run, over all its restarts, that led to the state of this process."""
        return self.loaded + self.steps

    def went_back_to(self, step: int) -> None:
        """Record that a checkpoint was loaded, which the run had saved after `step` steps."""
        self.loaded = self.shared[0] = step - self.steps

    def share(self, folder: str, rank: int) -> None:
        """From now on, write the numbers of steps to a file, which outlives the process."""
        with contextlib.suppress(OSError):
            self.shared = _mapped(os.path.join(folder, f"rank{rank}.steps"))
            self.shared[0], self.shared[1] = self.loaded, self.steps

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record what this process does inside the block."""
        # A single process has no monitor and does not import that module.
        from accel_state.hang_report.call_log import caller

        before = self._activity
        code, line = caller()
        self._activity = (name, code, line, time.monotonic())
        try:
            yield
        finally:
            self._activity = before

    def activity(self) -> Activity | None:
        """What the process currently does instead of training."""
        activity = self._activity
        if activity is None:
            return None
        from accel_state.hang_report.activity import Activity
        from accel_state.hang_report.call_log import locate

        name, code, line, begun = activity
        return Activity(name, locate(code.co_filename, line), time.monotonic() - begun)

    def pace(self) -> Pace:
        """How quickly the process trains, according to the steps that earlier calls have seen."""
        from accel_state.hang_report.activity import Pace

        now, steps = time.monotonic(), self.steps
        if not steps:
            return Pace(0, 0.0, 0.0)
        if not self._moments or self._moments[-1][1] != steps:
            self._moments.append((now, steps))
        (first, fewer), (last, more) = self._moments[0], self._moments[-1]
        return Pace(steps, (more - fewer) / (last - first) if last > first else 0.0, now - last)


PROGRESS: Final = TrainingProgress()
"""The progress of this process."""

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
    """The current step of a process, or its last one if it has ended; 0 if it has written none."""
    try:
        with open(os.path.join(folder, f"rank{rank}.steps"), "rb") as file:
            return sum(_STEPS.unpack(file.read(_STEPS.size)))
    except (OSError, struct.error):
        return 0


_MOST_SAMPLE_BYTES: Final = 2048


def sample_file(folder: str, rank: int) -> Callable[[str], None] | None:
    """A function that writes a text about samples to a file that outlives this process; None if that is impossible."""
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
    """Ids of the samples that a process of a restarted run last read; empty if it has written none."""
    try:
        with open(os.path.join(folder, f"rank{rank}.samples"), "rb") as file:
            found = json.loads(file.read(_MOST_SAMPLE_BYTES).partition(b"\0")[0])
    except (OSError, ValueError):
        return []
    return [str(sample) for sample in found] if isinstance(found, list) else []
