"""Measures how one process spends its time, in shares that add up to the total."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Protocol

from accel_data.order import RNGState
from accel_data.progress import Position
from accel_data.source import Source
from accel_state.transport.base import Transport, Work
from accel_state.transport.forwarding import ForwardingTransport

__all__ = ("SHARES", "Stopwatch", "TimedSource", "TimedTransport")

SHARES: Final = ("data", "forward", "backward", "waiting", "saving", "other")
"""Kinds of time; "waiting" is for other processes, "other" is everything else."""


class Stopwatch:
    """Adds up the time of the thread that created it, by share.

    Attributes:
        seconds: seconds of each share, up to the last change of share.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SHARES, 0.0)
        self._doing = ["other"]
        self._since = perf_counter()
        self._thread = threading.get_ident()

    def start(self, share: str) -> None:
        """Begin a share, nested in the current one."""
        if threading.get_ident() == self._thread:
            self._charge()
            self._doing.append(share)

    def stop(self) -> None:
        """End the current share, and continue the one around it."""
        if threading.get_ident() == self._thread and len(self._doing) > 1:
            self._charge()
            self._doing.pop()

    def become(self, share: str) -> None:
        """Replace the current share by another one."""
        if threading.get_ident() == self._thread:
            self._charge()
            self._doing[-1] = share

    def read(self) -> dict[str, float]:
        """Seconds by share until now."""
        self._charge()
        return dict(self.seconds)

    def _charge(self) -> None:
        now = perf_counter()
        self.seconds[self._doing[-1]] += now - self._since
        self._since = now

    def on(self, share: str) -> _Running:
        """Context manager whose time counts for a share."""
        return _Running(self, share)


class _Running:
    __slots__ = ("_share", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, share: str) -> None:
        self._stopwatch, self._share = stopwatch, share

    def __enter__(self) -> None:
        self._stopwatch.start(self._share)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopwatch.stop()


class TimedSource:
    """The source of a prepared loader, with reading timed; everything else is that of the source.

    Args:
        inner: the loader's source.
        stopwatch: receives the time.
    """

    def __init__(self, inner: Source, stopwatch: Stopwatch) -> None:
        self.inner = inner
        self._stopwatch = stopwatch

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        """Begin an epoch."""
        with self._stopwatch.on("data"):
            batches = self.inner.open(at, replay)
        end = object()
        while True:
            with self._stopwatch.on("data"):
                batch = next(batches, end)
            if batch is end:
                return
            yield batch
            # Its memory must be free before the next batch is read.
            del batch


class _TimedWork:
    __slots__ = ("_stopwatch", "_work", "is_completed")

    def __init__(self, work: Work, stopwatch: Timer) -> None:
        self._work, self._stopwatch = work, stopwatch
        self.is_completed = work.is_completed

    def wait(self, *timeout: Any) -> Any:
        with self._stopwatch.on("waiting"):
            return self._work.wait(*timeout)


class Timer(Protocol):
    """Charges time to shares: a stopwatch, or the account of a run."""

    def on(self, share: str) -> AbstractContextManager[Any]:
        """Context manager whose time counts for a share."""


class TimedTransport(ForwardingTransport):
    """Forwards every call to another transport, and measures how long this process waits for it.

    Args:
        inner: the transport that moves the data.
        stopwatch: receives the time.
    """

    def __init__(self, inner: Transport, stopwatch: Timer) -> None:
        super().__init__(inner)
        self._stopwatch = stopwatch

    def around(self, inner: Transport) -> TimedTransport:
        return TimedTransport(inner, self._stopwatch)

    def started(self, work: Work) -> Work:
        return _TimedWork(work, self._stopwatch)

    def barrier(self) -> None:
        with self._stopwatch.on("waiting"):
            super().barrier()
