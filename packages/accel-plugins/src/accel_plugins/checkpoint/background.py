"""Saving while training goes on: at most one save at a time, whose error nobody can miss."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable

from accel_plugins.checkpoint.snapshot import Buffers, Gate

__all__ = ("BackgroundSaver",)


class _InFlight:
    """One save: a thread that copies, opens the gate, and writes."""

    def __init__(self, work: Callable[[], None], gate: Gate, drop: Callable[[], None]) -> None:
        self._work, self._drop = work, drop
        self.gate = gate
        self.error: BaseException | None = None
        # No daemon: the interpreter waits for it, so a save that was begun is completed.
        self.thread = threading.Thread(target=self._run, name="accel-save", daemon=False)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again where somebody waits
            self.error = error
        finally:
            self.gate.open()
            self._drop()


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread.

    What went wrong is raised by the next `wait`; a program that ends without one shows it and has exit code 1.

    Attributes:
        buffers: host memory for the copies, kept for the next save.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.buffers = Buffers(pinned)
        self._pinned = pinned
        self._in_flight: _InFlight | None = None
        _savers.add(self)

    def start(self, work: Callable[[], None], gate: Gate) -> None:
        """Work in a thread; nothing may be in flight.

        Args:
            work: copies, opens the gate and writes the copy.
            gate: opened in any case when the work has ended.
        """
        self._in_flight = _InFlight(work, gate, self.buffers.forget_unused)
        self._in_flight.thread.start()

    def wait(self) -> None:
        """Return when nothing is in flight any more.

        Raises:
            BaseException: what the save in flight met.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        in_flight.thread.join()
        in_flight.gate.remove()
        if in_flight.error is not None:
            raise in_flight.error

    @property
    def busy(self) -> bool:
        """Whether a save is being copied or written."""
        return self._in_flight is not None and self._in_flight.thread.is_alive()

    def release(self) -> None:
        """Wait, and give the memory of the copies back."""
        self.wait()
        self.buffers = Buffers(self._pinned)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@atexit.register
def _show_errors_at_exit() -> None:
    """End with exit code 1 when a save failed and nobody has heard of it."""
    failed = False
    for saver in list(_savers):
        try:
            saver.wait()
        except BaseException as error:  # the last chance to be heard
            failed = True
            sys.stderr.write("A checkpoint that was being saved in the background is lost:\n")
            traceback.print_exception(error)
    if failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # The only way left to an exit code: exceptions raised here are shown and forgotten.
        os._exit(1)
