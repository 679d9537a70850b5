"""Ending a run that was asked to end, at a moment on which all processes agree.

A signal only sets a flag. A thread in each process sees that one of them was asked to end, and agrees with the others
on a boundary between batches that none has passed; all end there. Nobody waits for a process that trains, so a
collective that is under way is always completed. The request is a signed message: see `accel_state.transport.control`.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.boundaries import StepBoundaries
from accel_state.errors import AccelError, CheckpointError, StoreUnreachable
from accel_state.exit_codes import leave_to_resume

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("SIGNALS", "Preemption")

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that ask a run to save and end."""

_TICK: Final = 0.2
_PATIENCE: Final = 10.0
"""Seconds in which further signals are copies of the first; later ones end the process at once. A store that has not
answered for as long after a signal is gone."""

_ASKED: Final = "accel/preemption/asked"
_REQUEST: Final = "The run was asked to end, and the processes had to agree where."
_REMEDY: Final = "Restart the run from its newest checkpoint."


class Preemption:
    """Saves and ends at the next boundary after one of the processes was asked to end.

    Args:
        process: who this process is.
        save: saves a checkpoint; called on every process at the same boundary.
        deadline: seconds that processes wait for each other's counts.
    """

    def __init__(self, process: Process, save: Callable[[], object], deadline: float = 600.0) -> None:
        self._process, self._save, self._deadline = process, save, deadline
        self._signalled = 0.0
        self._boundaries = StepBoundaries()
        self._left = threading.Event()
        self._error: AccelError | None = None
        self._before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        self._alone = process.transport.store() is None
        if not self._alone:
            self._thread = threading.Thread(target=self._watch, name="accel-preemption", daemon=True)
            self._thread.start()
            atexit.register(self.leave)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        """The handler: it may interrupt anything, so it only takes a note."""
        now = time.monotonic()
        if self._signalled and now > self._signalled + _PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._signalled = self._signalled or now

    def between_batches(self) -> None:
        """Pass a boundary, or save and end here; called on every process whenever a batch is done.

        Raises:
            SystemExit: with `accel_state.exit_codes.RESUME`, once the checkpoint is complete.
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
        """Wait until somebody is asked to end, and agree where; what the store does not answer is asked again."""
        control = self._process.transport.control()
        assert control is not None
        silent_since: float | None = None
        while not self._left.wait(_TICK):
            try:
                if self._signalled:
                    control.set(_ASKED, b"", _PATIENCE)
                if _ASKED in control.get_many([_ASKED], _PATIENCE):
                    self._agree()
                    break
                silent_since = None
            except StoreUnreachable as error:
                now = time.monotonic()
                silent_since = silent_since or now
                if self._signalled and now >= silent_since + _PATIENCE:
                    self._error = CheckpointError(_REQUEST, error.obstacle, _REMEDY)
                    break
        control.close()

    def _agree(self) -> None:
        barrier = StoreBarrier(self._process, "preemption", _REQUEST, self._deadline, CheckpointError, _REMEDY)
        try:
            self._boundaries.agree(barrier)
        except AccelError as error:
            self._error = error

    def leave(self) -> None:
        """Stop watching, and give the signals back; called at the end of the process too."""
        self._left.set()
        if self._process.world_size > 1:
            self._thread.join(timeout=_PATIENCE)
            atexit.unregister(self.leave)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
