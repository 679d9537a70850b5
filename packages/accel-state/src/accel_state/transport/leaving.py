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

__all__ = ("Leaver", "leave_at_exit")

PATIENCE: Final = 10.0
"""Seconds that the end of the process waits for collectives that are under way."""

PATIENCE_AFTER_FAILURE: Final = 1.0
"""The same after an exception that nobody caught: the other processes will not join any more, and wait to be told."""


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
        self._thread.join(timeout=PATIENCE_AFTER_FAILURE if hasattr(sys, "last_value") else PATIENCE)

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
