"""Ends process groups: before the interpreter ends, and never in a forked process.

A gloo thread may still refer to the tensors of a collective that has already returned. It needs the GIL to release
them, and a thread that requests the GIL while the interpreter ends aborts the process. Therefore the groups and their
threads end first. A separate thread ends them, because a collective that another process never joined would block it.

An unreferenced group ends at a garbage collection. In a forked child its threads do not exist and their locks stay
locked, so ending it there hangs or crashes the child. Hooks of other modules, such as threading and logging, run first
in a child. Therefore collection is disabled from before the fork until the objects of the parent are excluded from it.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from functools import cache
from typing import Final
from weakref import WeakSet

from accel_state.transport.base import Transport

__all__ = ("exit_exception", "keep_garbage_at_forks", "record_exit_exception", "shutdown_at_exit")

_EXIT_TIMEOUT_S: Final = 10.0
"""Seconds for which the end of the process waits for unfinished collectives."""

_EXIT_TIMEOUT_AFTER_EXCEPTION_S: Final = 1.0
"""The same after an uncaught exception: the other processes join no further collective, and wait for a status."""

_exit_exception: str | None = None


def record_exit_exception(error: BaseException) -> None:
    """Record an uncaught exception that ends this process."""
    global _exit_exception
    _exit_exception = type(error).__name__


def exit_exception() -> str | None:
    """Name of the exception that ends this process; None when there is none."""
    # The interpreter stores an exception that it shows itself; a launcher that shows it instead does not.
    return type(sys.last_value).__name__ if hasattr(sys, "last_value") else _exit_exception


class _Exit:
    """The thread that shuts down all open transports, and the hook that wakes it."""

    def __init__(self) -> None:
        self.open: WeakSet[Transport] = WeakSet()
        self._ends = threading.Event()
        # The interpreter no longer starts threads when it runs its exit hooks (Python 3.12).
        self._thread = threading.Thread(target=self._run, name="accel_state.shutdown", daemon=True)
        self._thread.start()
        atexit.register(self._shutdown)

    def _shutdown(self) -> None:
        self._ends.set()
        self._thread.join(timeout=_EXIT_TIMEOUT_S if exit_exception() is None else _EXIT_TIMEOUT_AFTER_EXCEPTION_S)

    def _run(self) -> None:
        self._ends.wait()
        while self.open:
            self.open.pop().shutdown()


@cache
def _exit_of(_pid: int) -> _Exit:
    return _Exit()


def shutdown_at_exit(transport: Transport) -> None:
    """Shut a transport down when the interpreter ends, if it is still alive then; takes ten seconds at most."""
    _exit_of(os.getpid()).open.add(transport)


class _GarbagePause:
    """Disables garbage collection during forks; several threads may fork at the same time."""

    def __init__(self) -> None:
        self._forks = 0
        self._collects = True

    def begin(self) -> None:
        if not self._forks:
            self._collects = gc.isenabled()
        self._forks += 1
        gc.disable()

    def end_in_parent(self) -> None:
        self._forks -= 1
        if self._collects and not self._forks:
            gc.enable()

    def end_in_child(self) -> None:
        gc.freeze()
        self._forks = 0
        if self._collects:
            gc.enable()


@cache
def keep_garbage_at_forks() -> None:
    """From now on, no forked child collects the garbage of its parent."""
    if hasattr(os, "register_at_fork"):
        pause = _GarbagePause()
        os.register_at_fork(before=pause.begin, after_in_parent=pause.end_in_parent, after_in_child=pause.end_in_child)
