"""Errors of DataLoader workers, raised where a loader reads and nowhere else.

torch looks for workers that died in a handler of SIGCHLD, and raises from there, wherever the main thread is: also in
the middle of a collective or of a save, in which the other processes would then wait for this one. Here the error waits
for the next read of a loader.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

__all__ = ("WORKER_ERRORS", "raised_where_read")

WORKER_ERRORS: Final = ("DataLoader worker", "DataLoader timed out")
"""How torch's message begins when a DataLoader worker died or does not answer."""


class _DeferringHandler:
    """A handler of SIGCHLD that calls torch's, and keeps the error while the main thread does not read."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._error: RuntimeError | None = None
        self._reads = 0

    def install(self) -> bool:
        """Replace torch's handler, once for all loaders; returns whether errors are deferred."""
        if self._handler is None and sys.platform != "win32" and _is_main_thread():
            present = signal.getsignal(signal.SIGCHLD)
            if callable(present):
                self._handler = present
                signal.signal(signal.SIGCHLD, self)
        return self._handler is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        assert self._handler is not None
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            # A handler of the program, which torch's calls, may raise too.
            if self._reads or not str(error).startswith(WORKER_ERRORS):
                # The error may leave the read before it counts itself out.
                self._reads = 0
                raise
            self._error = error

    def read(self, batches: Iterator[Any]) -> Any:
        """The next batch; raises StopIteration at the end."""
        counts = _is_main_thread()
        self._reads += counts
        try:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return next(batches)
        except RuntimeError:
            # The workers of another thread's loader are reported by torch itself.
            self._error = None
            raise
        finally:
            self._reads = max(self._reads - counts, 0)


_handler: Final = _DeferringHandler()


def raised_where_read(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader whose workers were started just now.

    Args:
        batches: torch's iterator.
    """
    if not _handler.install():
        return batches
    return _reading(batches)


def _reading(batches: Iterator[Any]) -> Iterator[Any]:
    # No variable keeps the batch while the loop's body runs.
    try:
        while True:
            yield _handler.read(batches)
    except StopIteration:
        return


def _is_main_thread() -> bool:
    # Python runs handlers of signals only there.
    return threading.current_thread() is threading.main_thread()
