"""How process groups end: before the interpreter does, and never in a process that was forked.

A thread of gloo may still hold the tensors of a collective that has returned already. It needs the interpreter's lock
to release them, and a thread that requests the lock while the interpreter ends aborts the process. So the groups end
first, and their threads with them. They end on a thread of their own: a collective that another process never joined
would block them.

A group without a reference ends when the garbage is collected. In a forked child its threads are gone and the locks
that they held stay locked, so ending it there hangs or crashes the child. Hooks of other modules, such as those of
threading and logging, run first in a child, so collection pauses from before the fork until the objects of the parent
are set apart.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from functools import cache
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ("HasShutdown", "exit_exception", "keep_garbage_at_forks", "record_exit_exception", "shutdown_at_exit")

_TIMEOUT: Final = 10.0
"""Seconds for which the end of the process waits for collectives that are under way."""

_TIMEOUT_AFTER_EXCEPTION: Final = 1.0
"""The same after an uncaught exception: the other processes join no collective any more, and wait for news."""

_exit_exception: str | None = None


def record_exit_exception(error: BaseException) -> None:
    """Record an exception that nobody caught, and that ends this process."""
    global _exit_exception
    _exit_exception = type(error).__name__


def exit_exception() -> str | None:
    """Name of the exception that ends this process; None when there is none."""
    # The interpreter keeps the exception that it showed by itself; a launcher that shows it instead does not.
    return type(sys.last_value).__name__ if hasattr(sys, "last_value") else _exit_exception


class HasShutdown(Protocol):
    """An object that has to end before the interpreter."""

    def shutdown(self) -> None:
        """End it."""


class _Exit:
    """The thread that shuts down what is open, and the hook that wakes it."""

    def __init__(self) -> None:
        self.open: WeakSet[HasShutdown] = WeakSet()
        self._ends = threading.Event()
        # The interpreter starts no thread any more when it runs its exit hooks (Python 3.12).
        self._thread = threading.Thread(target=self._run, name="accel_state.shutdown", daemon=True)
        self._thread.start()
        atexit.register(self._shutdown)

    def _shutdown(self) -> None:
        self._ends.set()
        self._thread.join(timeout=_TIMEOUT if exit_exception() is None else _TIMEOUT_AFTER_EXCEPTION)

    def _run(self) -> None:
        self._ends.wait()
        while self.open:
            self.open.pop().shutdown()


@cache
def _exit_of(_pid: int) -> _Exit:
    return _Exit()


def shutdown_at_exit(target: HasShutdown) -> None:
    """Shut `target` down when the interpreter ends, if it is still alive then; takes ten seconds at most."""
    _exit_of(os.getpid()).open.add(target)


class _GarbagePause:
    """Garbage collection is off while forks are under way; several may be, in different threads."""

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
    """From now on, no child collects what was garbage when it was forked."""
    if hasattr(os, "register_at_fork"):
        pause = _GarbagePause()
        os.register_at_fork(before=pause.begin, after_in_parent=pause.end_in_parent, after_in_child=pause.end_in_child)
