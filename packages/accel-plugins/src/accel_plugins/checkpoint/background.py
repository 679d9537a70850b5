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

from accel_plugins.checkpoint.boundaries import StepBoundaries
from accel_plugins.checkpoint.snapshot import Buffers, Gate
from accel_state.errors import NotReady

__all__ = ("BackgroundSaver", "TornError")


class TornError(Exception):
    """What was copied on some process is not of one moment, so the checkpoint has to be taken again on all."""


class _InFlight:
    """One save: a thread that copies, opens the gate, and writes."""

    def __init__(
        self,
        work: Callable[[], None],
        gate: Gate,
        boundaries: StepBoundaries,
        again: Callable[[bool], None],
        drop: Callable[[], None],
    ) -> None:
        self._work, self._drop = work, drop
        self.gate, self.boundaries, self.again = gate, boundaries, again
        self.error: BaseException | None = None
        # No daemon: the interpreter waits for it, so a save that was begun is completed.
        self.thread = threading.Thread(target=self._run, name="accel-save", daemon=False)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again where somebody waits
            self.error = error
            if isinstance(error, TornError):
                _owing.add(self)
        finally:
            self.gate.open()
            self._drop()


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread.

    What went wrong is raised by the next `wait`; a program that ends without one shows it and has exit code 1. What is
    torn is taken again at the boundary on which the processes agreed, or by the next `wait`.

    Attributes:
        buffers: host memory for the copies, kept for the next save.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.buffers = Buffers(pinned)
        self._pinned = pinned
        self._in_flight: _InFlight | None = None
        _savers.add(self)

    def start(
        self, work: Callable[[], None], gate: Gate, boundaries: StepBoundaries, again: Callable[[bool], None]
    ) -> None:
        """Work in a thread; nothing may be in flight.

        Args:
            work: copies, opens the gate and writes the copy; raises `TornError` when the copy is torn.
            gate: opened in any case when the work has ended.
            boundaries: those of training since the state was taken.
            again: takes the state anew; with True, writes it before it returns.
        """
        self._in_flight = _InFlight(work, gate, boundaries, again, self.buffers.forget_unused)
        self._in_flight.thread.start()

    @property
    def boundaries(self) -> StepBoundaries | None:
        """The boundaries of training since the state of the save in flight was taken; None without one."""
        return None if self._in_flight is None else self._in_flight.boundaries

    def between_steps(self) -> None:
        """Pass a boundary of training, or take a torn checkpoint again here; called on every process.

        Raises:
            BaseException: what was met on the way to a copy.
        """
        in_flight = self._in_flight
        if in_flight is None or not in_flight.boundaries.reached():
            return
        in_flight.thread.join()
        if isinstance(in_flight.error, TornError):
            self._in_flight = None
            _owing.discard(in_flight)
            try:
                in_flight.again(False)
            except BaseException:
                in_flight.gate.remove()
                raise

    def wait_for_copy(self) -> None:
        """Return when what is being saved may be changed."""
        if self._in_flight is not None:
            self._in_flight.gate.wait()

    def wait(self) -> None:
        """Return when nothing is in flight any more.

        Raises:
            NotReady: a torn checkpoint cannot be taken again at this moment; it is by the next call.
            BaseException: what the save in flight met.
        """
        while (in_flight := self._in_flight) is not None:
            in_flight.thread.join()
            try:
                if isinstance(in_flight.error, TornError):
                    in_flight.again(True)
                elif in_flight.error is not None:
                    raise in_flight.error
            except TornError:
                # Another process took it again while it trained, and was disturbed once more.
                continue
            except NotReady:
                raise
            except BaseException:
                self._settle(in_flight)
                raise
            self._settle(in_flight)

    def _settle(self, in_flight: _InFlight) -> None:
        self._in_flight = None
        _owing.discard(in_flight)
        in_flight.gate.remove()

    @property
    def busy(self) -> bool:
        """Whether a save is being copied or written."""
        return self._in_flight is not None and self._in_flight.thread.is_alive()

    def release(self) -> None:
        """Wait, and give the memory of the copies back."""
        self.wait()
        self.buffers = Buffers(self._pinned)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()
_owing: set[_InFlight] = set()
"""Saves that have to be made again; they hold what is to be saved until then."""


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
