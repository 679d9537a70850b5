"""Save at boundaries between training steps on which all processes agree: when a run must end, and continuously.

Each process counts the boundaries that it passes, and a thread of each reports the count to the others. All save at the
boundary after the highest count. No process has to wait before that boundary, so started collectives complete.

A signal only sets a flag. When one process has received a signal, the threads agree on the boundary at which all save
and end. The request is a signed message: see `accel_state.transport.control`.

For continuous saving the first process decides when, from the measured cost of earlier saves. It announces the next
save through the store, and the threads agree on a boundary in the same way.
"""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Final

from accel_ops.agreement import StoreBarrier
from accel_state.errors import AccelError, CheckpointError, StoreUnreachable
from accel_state.exit_codes import leave_to_resume

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("SIGNALS", "ContinuousSaver", "Preemption", "SavePace", "StepBoundaries")

logger = logging.getLogger(__name__)

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that make a run save and end."""
_POLL_INTERVAL_S: Final = 0.2
_SIGNAL_PATIENCE_S: Final = 10.0
"""Seconds in which further signals count as copies of the first, and in which the store must answer after a signal."""
_REQUEST_KEY: Final = "accel/preemption/asked"
_REQUEST_TEXT: Final = "A signal requested the end of the run, and the processes must agree on a boundary."
_RESTART_REMEDY: Final = "Restart the run from its newest checkpoint."
_MAX_STEP_TIMES: Final = 64
"""Number of steps without a save of which times are recorded."""
_MIN_STEP_TIMES: Final = 8
"""Minimum number of steps without a save that are needed to measure the cost of a save."""
_ANNOUNCEMENT_INTERVAL_S: Final = 1.0
"""Seconds between two checks for an announcement."""
_REPLY_TIMEOUT_S: Final = 10.0
_FAREWELL_TIMEOUT_S: Final = 5.0
_SAVE_FAILURE: Final = "Cannot save during training."


class StepBoundaries:
    """Boundaries of training that all processes pass in the same order, and of which they choose one."""

    def __init__(self) -> None:
        self._passed = 0
        self._chosen: int | None = None
        self._frozen = False
        self._lock = threading.Lock()
        self._decided = threading.Event()

    def reached(self) -> bool:
        """Pass a boundary; called from the training thread.

        Returns:
            Whether the processes agreed on this boundary.
        """
        with self._lock:
            self._passed += 1
            if not self._frozen:
                return False
        self._decided.wait()
        return self._chosen is not None and self._passed >= self._chosen

    def agree(self, barrier: StoreBarrier) -> None:
        """Agree on a boundary that no process has passed; called from a thread of each process.

        Raises:
            CheckpointError: a process failed, or did not report before the deadline.
        """
        with self._lock:
            self._frozen = True
            passed = self._passed
        try:
            highest = barrier.wait("boundary", str(passed), lambda counts: max(counts, key=int), last=True)
            self._chosen = int(highest) + 1
        finally:
            self._decided.set()


class Preemption:
    """Saves and ends at the next common boundary after a process received a signal.

    Args:
        process: this process.
        save: saves a checkpoint; called on every process at the same boundary.
        deadline: seconds that processes wait for each other's counts.
    """

    def __init__(self, process: Process, save: Callable[[], object], deadline: float = 600.0) -> None:
        self._process, self._save, self._deadline = process, save, deadline
        self._signalled = 0.0
        self._boundaries = StepBoundaries()
        self._left = threading.Event()
        self._error: AccelError | None = None
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        self._alone = process.world_size == 1 or process.transport.store() is None
        if not self._alone:
            self._thread = threading.Thread(target=self._watch, name="accel-preemption", daemon=True)
            self._thread.start()
            atexit.register(self.leave)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: it may interrupt any code, so it only sets a flag."""
        now = time.monotonic()
        if self._signalled and now > self._signalled + _SIGNAL_PATIENCE_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._signalled = self._signalled or now

    def between_batches(self) -> None:
        """Pass a boundary, or save and end here; called on every process after each batch.

        Raises:
            SystemExit: with `accel_state.exit_codes.RESUME`, after the checkpoint is complete.
            CheckpointError: the processes could not agree, or saving failed.
        """
        if self._ends_here():
            self._save()
            leave_to_resume()

    def _ends_here(self) -> bool:
        if self._alone:
            return bool(self._signalled)
        ends = self._boundaries.reached()
        if self._error is not None:
            raise self._error
        return ends

    def _watch(self) -> None:
        """Wait until a process receives a signal, and agree on a boundary; retry if the store does not answer."""
        control = self._process.transport.control()
        assert control is not None
        silent_since: float | None = None
        while not self._left.wait(_POLL_INTERVAL_S):
            try:
                if self._signalled:
                    control.set(_REQUEST_KEY, b"", _SIGNAL_PATIENCE_S)
                if _REQUEST_KEY in control.get_many([_REQUEST_KEY], _SIGNAL_PATIENCE_S):
                    self._agree()
                    break
                silent_since = None
            except StoreUnreachable as error:
                now = time.monotonic()
                silent_since = silent_since or now
                if self._signalled and now >= silent_since + _SIGNAL_PATIENCE_S:
                    self._error = CheckpointError(_REQUEST_TEXT, error.obstacle, _RESTART_REMEDY)
                    break

    def _agree(self) -> None:
        barrier = StoreBarrier(
            self._process, "preemption", _REQUEST_TEXT, self._deadline, CheckpointError, _RESTART_REMEDY
        )
        try:
            self._boundaries.agree(barrier)
        except AccelError as error:
            self._error = error

    def leave(self) -> None:
        """Stop, and restore the signal handlers; also called at the end of the process."""
        self._left.set()
        if not self._alone:
            self._thread.join(timeout=_SIGNAL_PATIENCE_S)
            atexit.unregister(self.leave)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}


class SavePace:
    """Determines from step times when the next save may begin.

    The cost of a save is the extra time of steps during the save, including its copying and writing in the background.
    The next save may begin when the cost of all saves, plus one more like the last, is within `max_overhead`.

    Args:
        max_overhead: the fraction of the run's time that saving may cost.
    """

    def __init__(self, max_overhead: float) -> None:
        self._share = max_overhead
        self._plain: deque[float] = deque(maxlen=_MAX_STEP_TIMES)
        self._began: float | None = None
        self._last = 0.0
        self._saving = False
        self._cost = self._before = self._last_cost = 0.0

    @property
    def cost(self) -> float:
        """Total cost of saves so far, in seconds."""
        return self._cost

    def passed(self, now: float, saving: bool) -> bool:
        """Pass a boundary between two steps.

        Args:
            now: seconds of a monotonic clock.
            saving: whether a save is in flight.

        Returns:
            Whether a save may begin here.
        """
        if self._began is None:
            self._began = now
        elif self._saving:
            self._cost += max(now - self._last - median(self._plain), 0.0) if self._plain else 0.0
        else:
            self._plain.append(now - self._last)
        if self._saving and not saving:
            self._last_cost, self._saving = self._cost - self._before, False
        self._last = now
        if saving or len(self._plain) < _MIN_STEP_TIMES:
            return False
        return self._cost + self._last_cost <= self._share * (now - self._began)

    def begin(self) -> None:
        """Record that a save begins at the latest boundary."""
        self._saving, self._before = True, self._cost


class ContinuousSaver:
    """Calls `save` on every process at agreed boundaries, as often as `pace` allows.

    Args:
        process: this process.
        save: starts saving a checkpoint; called on every process at the same boundary.
        busy: returns whether a save is in flight on this process.
        pace: determines when to save; only that of the first process is used.
        deadline: maximum time in seconds that processes wait for each other.
    """

    def __init__(
        self,
        process: Process,
        save: Callable[[], object],
        busy: Callable[[], bool],
        pace: SavePace,
        deadline: float = 600.0,
    ) -> None:
        self._process, self._save, self._busy, self._pace, self._deadline = process, save, busy, pace, deadline
        self._boundaries = StepBoundaries()
        self._error: AccelError | None = None
        self._due, self._taken, self._left = threading.Event(), threading.Event(), threading.Event()
        self._alone = process.world_size == 1 or process.transport.store() is None
        if not self._alone:
            self._thread = threading.Thread(target=self._watch, name="accel-continuous", daemon=True)
            self._thread.start()
            atexit.register(self.leave)

    def between_steps(self) -> None:
        """Pass a boundary, and start saving here if the processes agreed on it; called on every process.

        Raises:
            CheckpointError: the processes could not agree, or a save failed.
        """
        due = self._process.rank == 0 and self._pace.passed(time.monotonic(), self._busy())
        if self._alone:
            if due:
                self._begin()
            return
        if due:
            self._due.set()
        if self._boundaries.reached():
            self._boundaries = StepBoundaries()
            self._due.clear()
            self._taken.set()
            self._begin()
        if self._error is not None:
            raise self._error

    def _begin(self) -> None:
        self._pace.begin()
        self._save()

    def _watch(self) -> None:
        """Agree on a boundary for each save that the first process announces."""
        control = self._process.transport.control()
        assert control is not None
        turn = 0
        while not self._left.is_set():
            key = f"accel/continuous/{turn}"
            try:
                if self._process.rank == 0:
                    if not self._due.wait(_ANNOUNCEMENT_INTERVAL_S):
                        continue
                    control.set(key, b"", _REPLY_TIMEOUT_S)
                elif key not in control.get_many([key], _REPLY_TIMEOUT_S):
                    self._left.wait(_ANNOUNCEMENT_INTERVAL_S)
                    continue
            except StoreUnreachable as error:
                # If the store remains unreachable, the run's next collective raises a better error.
                logger.debug("%s", error)
                self._left.wait(_ANNOUNCEMENT_INTERVAL_S)
                continue
            if not self._agreed():
                break
            if self._process.rank == 0:
                control.delete([key], _REPLY_TIMEOUT_S)
            turn += 1
            while not self._left.is_set() and not self._taken.wait(_ANNOUNCEMENT_INTERVAL_S):
                pass
            self._taken.clear()

    def _agreed(self) -> bool:
        barrier = StoreBarrier(
            self._process, "continuous", _SAVE_FAILURE, self._deadline, CheckpointError, _RESTART_REMEDY
        )
        try:
            self._boundaries.agree(barrier)
        except AccelError as error:
            # The store does not answer after the end of a run either.
            if not self._left.is_set():
                self._error = error
            return False
        return True

    def leave(self) -> None:
        """Stop; called at the end of training and of the process."""
        self._left.set()
        if not self._alone:
            self._thread.join(timeout=_FAREWELL_TIMEOUT_S)
            atexit.unregister(self.leave)
