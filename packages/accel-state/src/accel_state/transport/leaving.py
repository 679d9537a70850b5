"""Ending the process groups before the interpreter ends.

A thread of gloo may still hold the tensors of a collective that has returned already. It needs the interpreter's lock
to let go of them, and a thread that asks for the lock while the interpreter ends aborts the process. So the groups end
first, and their threads with them. They end on a thread of their own: a collective that another process never joined
would hold them up.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from functools import cache
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ("Leaver", "how_it_ends", "leave_at_exit", "note_failure")

PATIENCE: Final = 10.0
"""Seconds that the end of the process waits for collectives that are under way."""

PATIENCE_AFTER_FAILURE: Final = 1.0
"""The same after an exception that nobody caught: the other processes will not join any more, and wait to be told."""


_failure: str | None = None


def note_failure(error: BaseException) -> None:
    """Take note of an exception that nobody caught, and that ends this process."""
    global _failure
    _failure = type(error).__name__


def how_it_ends() -> str | None:
    """Name of the exception that ends this process; None when there is none."""
    # The interpreter keeps what it has shown by itself; a launcher that shows it instead does not.
    return type(sys.last_value).__name__ if hasattr(sys, "last_value") else _failure


class Leaver(Protocol):
    """What has to be ended before the interpreter."""

    def leave(self) -> None:
        """End it."""


class _Exit:
    """The thread that ends what is open, and the hook that asks it to."""

    def __init__(self) -> None:
        self.open: WeakSet[Leaver] = WeakSet()
        self._asked = threading.Event()
        # A thread cannot be started any more when the interpreter runs its exit hooks (Python 3.12).
        self._thread = threading.Thread(target=self._run, name="accel_state.leaving", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def _leave(self) -> None:
        self._asked.set()
        self._thread.join(timeout=PATIENCE if how_it_ends() is None else PATIENCE_AFTER_FAILURE)

    def _run(self) -> None:
        self._asked.wait()
        while self.open:
            self.open.pop().leave()


@cache
def _exit_of(_pid: int) -> _Exit:
    return _Exit()


def leave_at_exit(leaver: Leaver) -> None:
    """End `leaver` when the interpreter ends, if it still lives then; bounded by `PATIENCE`."""
    _exit_of(os.getpid()).open.add(leaver)
