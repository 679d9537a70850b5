"""Saving again and again while training goes on, at moments on which all processes agree.

The first process decides when: it knows how much time the saves have cost so far. It announces the next save through
the store; a thread in each process sees that and agrees with the others on a boundary between two steps that none has
passed, as for pre-emption. Nobody who trains waits for the announcement.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Final

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.boundaries import StepBoundaries
from accel_state.errors import AccelError, CheckpointError, StoreUnreachable

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("ContinuousSaver", "SavePace")

logger = logging.getLogger(__name__)

_KNOWN: Final = 64
"""Undisturbed steps whose times are remembered."""
_FEWEST: Final = 8
"""Undisturbed steps without which nobody can say what a save costs."""

_LOOK: Final = 1.0
"""Seconds between two looks for an announcement."""
_ANSWER: Final = 10.0
_FAREWELL: Final = 5.0

_FAILED: Final = "Cannot save while training goes on."
_REMEDY: Final = "Restart the run from its newest checkpoint."


class SavePace:
    """When the next save may begin, from the times of the steps.

    A save costs what the steps during it take longer than undisturbed ones, copying and writing in the background
    included. The next may begin when what all saves have cost, with one more like the last, stays within the share.

    Args:
        max_overhead: the share of the run's time that saving may cost.
    """

    def __init__(self, max_overhead: float) -> None:
        self._share = max_overhead
        self._plain: deque[float] = deque(maxlen=_KNOWN)
        self._began: float | None = None
        self._last = 0.0
        self._saving = False
        self._cost = self._before = self._last_cost = 0.0

    @property
    def cost(self) -> float:
        """Seconds that saves have cost so far."""
        return self._cost

    def passed(self, now: float, saving: bool) -> bool:
        """Pass a boundary between two steps.

        Args:
            now: seconds of a clock that does not go back.
            saving: whether a save is under way.

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
        if saving or len(self._plain) < _FEWEST:
            return False
        return self._cost + self._last_cost <= self._share * (now - self._began)

    def begin(self) -> None:
        """A save begins at the boundary that was passed last."""
        self._saving, self._before = True, self._cost


class ContinuousSaver:
    """Calls `save` on every process at boundaries on which they agree, as often as the pace allows.

    Args:
        process: who this process is.
        save: begins to save a checkpoint; called on every process at the same boundary.
        busy: whether a save is under way on this process.
        pace: decides when; that of the first process counts.
        deadline: seconds that processes wait for each other.
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
        self._alone = process.transport.store() is None
        if not self._alone:
            self._thread = threading.Thread(target=self._watch, name="accel-continuous", daemon=True)
            self._thread.start()
            atexit.register(self.leave)

    def between_steps(self) -> None:
        """Pass a boundary, and begin to save here if the processes agreed to; called on every process.

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
                    if not self._due.wait(_LOOK):
                        continue
                    control.set(key, b"", _ANSWER)
                elif key not in control.get_all([key], _ANSWER):
                    self._left.wait(_LOOK)
                    continue
            except StoreUnreachable as error:
                # The next collective of the run says more, if the store stays away.
                logger.debug("%s", error)
                self._left.wait(_LOOK)
                continue
            if not self._agreed():
                break
            if self._process.rank == 0:
                control.delete([key], _ANSWER)
            turn += 1
            while not self._left.is_set() and not self._taken.wait(_LOOK):
                pass
            self._taken.clear()
        control.close()

    def _agreed(self) -> bool:
        barrier = StoreBarrier(self._process, "continuous", _FAILED, self._deadline, CheckpointError, _REMEDY)
        try:
            self._boundaries.agree(barrier)
        except AccelError as error:
            # A run that has ended does not answer either.
            if not self._left.is_set():
                self._error = error
            return False
        return True

    def leave(self) -> None:
        """Stop; called at the end of training and of the process too."""
        self._left.set()
        if not self._alone:
            self._thread.join(timeout=_FAREWELL)
            atexit.unregister(self.leave)
