"""The thread that tells the other processes, through the store, where this one is; and reads where they are.

It works twice a second on a connection of its own, and never on the path of a call. The picture that it read last is
kept, because the process that hosts the store may be the one that dies.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from accel_state.hang_report.call_log import CallLog
from accel_state.hang_report.sightings import Sighting, look

__all__ = ("Picture", "Watch")

TICK: Final = 0.5
"""Seconds between two sightings."""

_PATIENCE: Final = timedelta(seconds=2)
_LAST_PATIENCE: Final = 5 * _PATIENCE
"""How long the thread may take to end: every call on a store whose host has gone takes `_PATIENCE`, and a thread that
is still inside of one when the interpreter ends aborts the process."""

_RANKS_READ_PER_TICK: Final = 16
_GIVE_UP_AFTER: Final = 3
_ASKED: Final = "accel_ops/asked"


class Picture:
    """Where all processes are.

    Args:
        sightings: by rank; ranks that never published are missing.
        taken: when it was read, seconds of the monotonic clock.
        fresh: whether the store could be read for it; otherwise it is the one read last.
    """

    __slots__ = ("fresh", "sightings", "taken")

    def __init__(self, sightings: dict[int, Sighting], taken: float, fresh: bool = True) -> None:
        self.sightings = sightings
        self.taken = taken
        self.fresh = fresh


class Watch:
    """Publishes the sightings of one process and reads those of all.

    Args:
        log: the call log of this process.
        store: the store that the processes share; None, or one that allows no second connection, turns it off.
        rank: index of this process.
        world_size: number of processes.
    """

    def __init__(self, log: CallLog, store: Any | None, rank: int, world_size: int) -> None:
        self._log = log
        self._rank = rank
        self._pid = os.getpid()
        self._keys = [f"accel_ops/sighting/{other}" for other in range(world_size)]
        self._read_every = max(1, world_size // _RANKS_READ_PER_TICK)
        self._asked_before = 0
        self._store = _connection(store)
        self._last = Picture({}, time.monotonic(), fresh=False)
        self._stopped = threading.Event()
        # Held while the connection is used, by the thread and by the one that has to explain a failure.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(target=self._run, name="accel_state.hang_report.watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; called when the transport goes, and before the interpreter does.

        In a forked child there is no thread to end, and its lock may never be let go.
        """
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LAST_PATIENCE.total_seconds())
        with self._lock:
            self._publish(replace(look(self._log), left=True))
            self._store = None

    def ask(self) -> None:
        """Ask all processes to look closely where they are; within a tick they have answered."""
        with self._lock:
            try:
                if self._store is not None:
                    self._store.add(_ASKED, 1)
            except RuntimeError:
                return

    def picture(self) -> Picture:
        """Where all processes are, with a fresh sighting of this one."""
        mine = look(self._log, closely=True)
        with self._lock:
            if self._publish(mine):
                return self._read()
            return Picture({**self._last.sightings, self._rank: mine}, self._last.taken, fresh=False)

    def _run(self) -> None:
        ticks = failures = 0
        while not self._stopped.wait(TICK if ticks else 0.0):
            with self._lock:
                failures = 0 if self._publish(look(self._log, closely=self._asked())) else failures + 1
                if failures == _GIVE_UP_AFTER:
                    return
                if not failures and ticks % self._read_every == 0:
                    self._read()
            ticks += 1

    def _asked(self) -> bool:
        """Whether another process has asked since this was called last."""
        store: Any = self._store
        try:
            asked = int(store.add(_ASKED, 0))
        except RuntimeError:
            return False
        before, self._asked_before = self._asked_before, asked
        return asked != before

    def _publish(self, sighting: Sighting) -> bool:
        if self._store is None:
            return False
        try:
            self._store.set(self._keys[self._rank], sighting.to_json())
        except RuntimeError:
            return False
        return True

    def _read(self) -> Picture:
        store: Any = self._store
        try:
            if store.check(self._keys):
                texts = dict(enumerate(store.multi_get(self._keys)))
            else:
                texts = {rank: store.get(key) for rank, key in enumerate(self._keys) if store.check([key])}
        except RuntimeError:
            return Picture(self._last.sightings, self._last.taken, fresh=False)
        sightings = {rank: Sighting.from_json(text) for rank, text in texts.items()}
        self._last = Picture(sightings, time.monotonic())
        return self._last


def _connection(store: Any | None) -> Any | None:
    """A second connection to the same store: on a shared one, a wait of another thread would keep us out."""
    if store is None:
        return None
    try:
        own = store.clone()
        own.set_timeout(_PATIENCE)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return own
