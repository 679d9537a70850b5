"""The thread that tells the other processes, through the store, where this one is; and reads where they are.

It works twice a second, and never on the path of a call. Once a second it writes to the store, and looks whether
somebody asked. Nobody waits for the store but this thread: what is asked of a watch is answered from what it read last,
because the process that hosts the store may be the one that is stopped, dead, or on the other side of a broken link.
Small worlds read what the others wrote all the time, so that they know it also when the store is gone. In large ones
each process would read as many values as there are processes, so that nothing is read before this process asks. What a
launcher reads is written to a file besides.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from dataclasses import replace
from typing import Final, NamedTuple
from weakref import WeakSet

from accel_state.errors import StoreUnreachable
from accel_state.hang_report.call_log import CallLog
from accel_state.hang_report.main_thread import Place
from accel_state.hang_report.sightings import Sighting, look
from accel_state.hang_report.status import Heard, StatusFile
from accel_state.transport.control import ControlStore
from accel_state.transport.shutdown import exit_exception

__all__ = ("MOST_READ_UNASKED", "TICK", "Picture", "Watch")

TICK: Final = 0.5
"""Seconds between two sightings."""

_PUBLISH_EVERY: Final = 1.0
"""Seconds between two writes to the store."""

MOST_READ_UNASKED: Final = 16
"""Processes of a run in which each reads where the others are before somebody asks."""

_PATIENCE: Final = 2.0
"""Seconds that one request may take."""

_LONGEST_PAUSE: Final = 8.0
"""Seconds between two tries, at most, on a store that does not answer."""

_CLOSELY: Final = 5.0
"""Seconds for which a process looks closely where it is after somebody asked."""

_LAST_PATIENCE: Final = 3.0
"""Seconds that the thread is given to end."""

_GLANCES: Final = 5
"""How often in a tick the thread looks whether it was asked."""

_ASKED: Final = "hang_report/asked"


class Picture(NamedTuple):
    """Where all processes are.

    Args:
        sightings: by rank; ranks that never published are missing.
        ages: seconds since something new was heard of each of them.
        taken: when the store was read, seconds of the monotonic clock.
        store_failed: when the store was found not to answer, if it has not answered since; else None.
    """

    sightings: dict[int, Sighting]
    ages: dict[int, float]
    taken: float
    store_failed: float | None


class Watch:
    """Publishes the sightings of one process and reads those of all.

    Args:
        log: the call log of this process.
        control: a connection to the store that the processes share, for this watch alone; None turns it off.
        rank: index of this process.
        world_size: number of processes.

    Attributes:
        pinned: where this process is said to be, once it has left that place because of an error.
        reads_unasked: whether it reads where the others are before `ask` is called.
    """

    def __init__(self, log: CallLog, control: ControlStore | None, rank: int, world_size: int) -> None:
        self._log = log
        self._rank = rank
        self._pid = os.getpid()
        self._keys = [f"hang_report/sighting/{other}" for other in range(world_size)]
        self.reads_unasked = world_size <= MOST_READ_UNASKED
        self._failures = 0
        self._try_again = 0.0
        self._publish_at = 0.0
        self._reads_until = 0.0
        self._control = control if world_size > 1 else None
        self._status = StatusFile.of_run(rank)
        self._texts: dict[int, bytes] = {}
        self._sightings: dict[int, Sighting] = {}
        self._heard: dict[int, float] = {}
        self._taken = time.monotonic()
        self._failed: float | None = None
        self._asked_before = b""
        self._closely_until = 0.0
        self._ask = False
        self._end = threading.Event()
        self.pinned: Place | None = None
        self._thread: threading.Thread | None = None
        if self._control is not None or self._status is not None:
            self._thread = threading.Thread(target=self._run, name="accel_state.watch", daemon=True)
            self._thread.start()
            # Before the groups end, whose end is what the others notice first.
            _watches_of(self._pid).add(self)

    def stop(self) -> None:
        """End the thread; called when the transport goes, and before the interpreter does.

        In a forked child there is no thread to end, and its lock may never be let go.
        """
        if os.getpid() != self._pid or self._thread is None or self._end.is_set():
            return
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_LAST_PATIENCE)
        last = replace(look(self._log), left=f"with {error}" if (error := exit_exception()) else "without an exception")
        if self._status is not None:
            self._status.write(last)
        if self._control is not None and self._failed is None and not self._thread.is_alive():
            self._publish(last)
            self._control.close()

    def ask(self) -> float:
        """Ask all processes to look closely where they are, and return the time; they have answered two ticks later.

        Does not wait, and takes no lock: handlers of signals call this too.
        """
        now = time.monotonic()
        self._closely_until = self._reads_until = now + _CLOSELY
        self._ask = True
        return now

    def picture(self) -> Picture:
        """Where all processes are, with a fresh sighting of this one. Does not wait."""
        now = time.monotonic()
        sightings = {**self._sightings, self._rank: look(self._log, True, self.pinned)}
        heard = {**self._heard, self._rank: now}
        return Picture(sightings, {rank: now - at for rank, at in heard.items()}, self._taken, self._failed)

    def _run(self) -> None:
        while True:
            asks, self._ask = self._ask, False
            now = time.monotonic()
            closely = now < self._closely_until
            tells_of_others = self._status is not None and self._status.is_asked_for_others()
            if tells_of_others:
                self._reads_until = now + _CLOSELY
            if tells_of_others and not closely:
                asks = closely = True
                self._closely_until = now + _CLOSELY
            if self._status is not None:
                closely = self._status.is_asked() or closely
                self._status.write(look(self._log, closely, self.pinned))
            if self._control is not None and (asks or now >= self._try_again):
                self._use_store(now, closely, asks)
            if self._status is not None and tells_of_others:
                self._status.write_heard(self._heard_of())
            # `ask` takes no lock, so nothing wakes this thread.
            for _ in range(_GLANCES):
                if self._end.wait(TICK / _GLANCES):
                    return
                if self._ask:
                    break

    def _use_store(self, now: float, closely: bool, asks: bool) -> None:
        reads = now < self._reads_until
        if self._tell(now, closely, asks) and (reads or self.reads_unasked):
            self._read()
        self._failures = 0 if self._failed is None else self._failures + 1
        pause = TICK if reads else _PUBLISH_EVERY
        if self._failures:
            pause = min(TICK * 2**self._failures, _LONGEST_PAUSE)
        # A little less, because the thread looks at the time in ticks.
        self._try_again = now + pause - TICK / 2

    def _heard_of(self) -> Heard:
        sightings, ages, _, failed = self.picture()
        return Heard(time.time(), failed is None, sightings, ages)

    def _tell(self, now: float, closely: bool, asks: bool) -> bool:
        """Publish a sighting, and hear whether somebody asked for closer ones; whether the store answered."""
        control = self._control
        assert control is not None
        try:
            if asks:
                control.set(_ASKED, b"%d %d" % (self._rank, time.time_ns()), _PATIENCE)
            asked = control.get_many([_ASKED], _PATIENCE).get(_ASKED, b"")
        except StoreUnreachable:
            self._failed = time.monotonic()
            return False
        if asked != self._asked_before:
            self._asked_before = asked
            self._closely_until = time.monotonic() + _CLOSELY
            closely = True
        if now < self._publish_at:
            self._failed = None
            return True
        self._publish_at = now + _PUBLISH_EVERY
        return self._publish(look(self._log, closely, self.pinned))

    def _publish(self, sighting: Sighting) -> bool:
        assert self._control is not None
        try:
            self._control.set(self._keys[self._rank], sighting.to_json().encode(), _PATIENCE)
        except StoreUnreachable:
            self._failed = time.monotonic()
            return False
        self._failed = None
        return True

    def _read(self) -> None:
        assert self._control is not None
        try:
            found = self._control.get_many(self._keys, _PATIENCE)
        except StoreUnreachable:
            self._failed = time.monotonic()
            return
        now = time.monotonic()
        sightings, heard = dict(self._sightings), dict(self._heard)
        for rank, key in enumerate(self._keys):
            text = found.get(key)
            if text is None or text == self._texts.get(rank):
                continue
            sighting = Sighting.from_json(text)
            if sighting is not None:
                self._texts[rank] = text
                sightings[rank], heard[rank] = sighting, now
        # Others read these while this thread goes on, so they are replaced as a whole.
        self._heard, self._sightings = heard, sightings
        self._taken = now


@functools.cache
def _watches_of(_pid: int) -> WeakSet[Watch]:
    """The watches of this process, which are stopped when the interpreter ends, before the groups that exist by now."""
    watches: WeakSet[Watch] = WeakSet()

    def stop() -> None:
        for watch in list(watches):
            watch.stop()

    atexit.register(stop)
    return watches
