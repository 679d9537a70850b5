"""Ending a run that was asked to end, at a moment on which all processes agree.

A signal only sets a flag. Each process counts the boundaries between batches that it passes. A thread in each sees that
one of them was asked to end, stops the count, and tells it to the others; all end at the boundary after the highest
count. Nobody waits for a process that trains, so a collective that is under way is always completed.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from accel_state.errors import CheckpointError
from accel_state.exit_codes import leave_to_resume

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("SIGNALS", "Preemption")

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that ask a run to save and end."""

_TICK: Final = 0.2
_PATIENCE: Final = 10.0
"""Seconds in which further signals are copies of the first; later ones end the process at once."""

_ASKED: Final = "accel/preemption/asked"


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
        self._passed = 0
        self._ends_at: int | None = None
        self._frozen = False
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._left = threading.Event()
        self._error: CheckpointError | None = None
        self._before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        if process.world_size > 1:
            store: Any = process.transport.store()
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=_PATIENCE))
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
        if self._process.world_size == 1:
            return bool(self._signalled)
        with self._lock:
            self._passed += 1
            if not self._frozen:
                return False
        self._decided.wait()
        if self._error is not None:
            raise self._error
        return self._ends_at is not None and self._passed >= self._ends_at

    def _watch(self) -> None:
        """Wait until somebody is asked to end, and agree where."""
        try:
            while not self._left.wait(_TICK):
                if self._signalled:
                    self._store.set(_ASKED, "")
                if self._signalled or self._store.check([_ASKED]):
                    self._agree()
                    return
        except RuntimeError as error:
            # The store went with the process that serves it, so there is nobody left to agree with.
            self._fail(f"The store of the run does not answer: {error}")
        finally:
            self._decided.set()

    def _agree(self) -> None:
        with self._lock:
            self._frozen = True
            passed = self._passed
        keys = [f"{_ASKED}/{rank}" for rank in range(self._process.world_size)]
        self._store.set(keys[self._process.rank], str(passed))
        until = time.monotonic() + self._deadline
        while missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
            if time.monotonic() > until:
                self._fail(f"Process {', '.join(map(str, missing))} did not answer within {self._deadline:g} s.")
                return
            time.sleep(_TICK / 20)
        self._ends_at = max(int(self._store.get(key)) for key in keys) + 1

    def _fail(self, obstacle: str) -> None:
        if self._frozen:
            asked = "The run was asked to end, and the processes had to agree where."
            self._error = CheckpointError(asked, obstacle, "Restart the run from its newest checkpoint.")

    def leave(self) -> None:
        """Stop watching, and give the signals back; called at the end of the process too."""
        self._left.set()
        if self._process.world_size > 1:
            self._thread.join(timeout=_PATIENCE)
            atexit.unregister(self.leave)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
