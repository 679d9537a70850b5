"""The monitor: a thread that publishes the status of this rank, in its record and the store, and reads those of others.

It works twice a second, and never inside a call. Once a second it writes to the store and checks whether a rank
requests stacks. Only this thread waits for the store: `world` contains what the thread last read, because the process
that hosts the store may itself be stopped, dead, or unreachable. In small worlds every rank reads the statuses of the
others all the time, and still has them when the store is gone. In large worlds that would be too many reads, so a rank
reads the statuses only after it has requested stacks. The thread also appends the lines of the time account.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
from typing import Final
from weakref import WeakSet

from accel_state.errors import StoreUnreachable
from accel_state.transport.control import ControlStore
from accel_state.transport.shutdown import exit_exception
from accel_state.watch.calls import CallLog, UserFrame
from accel_state.watch.goodput import account_line, append_line, memory_in_use, pause_after
from accel_state.watch.record import STATUS_FOLDER, STATUS_RECORD
from accel_state.watch.status import (
    EXITED_NORMALLY,
    RankStatus,
    World,
    capture_status,
    stack_requested,
    world_requested,
    write_world,
)

__all__ = ("ALWAYS_READ_UP_TO", "TICK", "HangMonitor")

TICK: Final = 0.5
"""Seconds between two captures."""

_PUBLISH_INTERVAL_S: Final = 1.0
"""Seconds between two writes to the store."""

ALWAYS_READ_UP_TO: Final = 16
"""Largest world size at which each rank reads the statuses of the others all the time."""

_REQUEST_TIMEOUT_S: Final = 2.0
"""Seconds that one request to the store may take."""

_MAX_RETRY_PAUSE_S: Final = 8.0
"""Maximum seconds between two attempts if the store does not answer."""

_STACK_CAPTURE_S: Final = 5.0
"""Seconds for which a rank captures its stack after a request."""

_JOIN_TIMEOUT_S: Final = 3.0
"""Seconds that the thread may take to end."""

_POLLS_PER_TICK: Final = 5
"""How often per tick the thread checks whether this rank has requested stacks."""

_REQUEST_KEY: Final = "hang_report/request"


class HangMonitor:
    """Publishes the status of one rank and reads those of all.

    The thread starts when there is something for it to do: other processes, a record that others read, or an account.

    Args:
        log: the call log of this process.
        control: the control messages of the run; None if it has only one process.
        rank: index of this process.
        world_size: number of processes.

    Attributes:
        pinned: the position of this process when an error was raised, as long as that error is being reported.
        interruption: see `RankStatus`.
        always_reads: whether it reads the statuses of the others before `request_stacks` is called.
    """

    def __init__(self, log: CallLog, control: ControlStore | None, rank: int, world_size: int) -> None:
        self._log = log
        self._rank = rank
        self._pid = os.getpid()
        self._world_size = world_size
        self.always_reads = world_size <= ALWAYS_READ_UP_TO
        self._failures = 0
        self._try_again = self._publish_at = self._reads_until = self._stacks_until = self._line_due = 0.0
        self._control = control if world_size > 1 else None
        self._texts: dict[int, bytes] = {}
        self._statuses: dict[int, RankStatus] = {}
        self._arrived: dict[int, float] = {}
        self._read_at = time.monotonic()
        self._store_answers = True
        self._last_request = b""
        self._requests = False
        self._end = threading.Event()
        self.pinned: UserFrame | None = None
        self.interruption = ""
        self._thread: threading.Thread | None = None
        if self._control is not None or STATUS_FOLDER in os.environ:
            self.start()

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="accel_state.monitor", daemon=True)
            self._thread.start()
            # Before the groups end: otherwise the other ranks would notice that first.
            _monitors_of(self._pid).add(self)

    def stop(self) -> None:
        """End the thread; called when the transport is deleted, and before the interpreter ends.

        In a forked child there is no thread to end, and its lock may stay locked forever.
        """
        if os.getpid() != self._pid or self._thread is None or self._end.is_set():
            return
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
        error = exit_exception()
        last = capture_status(self._log, left=f"with {error}" if error else EXITED_NORMALLY)
        STATUS_RECORD.publish(last.to_json())
        if self._control is not None and self._store_answers and not self._thread.is_alive():
            with contextlib.suppress(StoreUnreachable):
                self._publish(last)

    def request_stacks(self) -> float:
        """Request that all ranks capture their stacks, and return the time; the answers arrive within two ticks.

        Does not wait and takes no lock, because signal handlers call this too.
        """
        now = time.monotonic()
        self._stacks_until = self._reads_until = now + _STACK_CAPTURE_S
        self._requests = True
        return now

    def world(self) -> World:
        """The statuses of all ranks, with a new one of this rank. Does not wait."""
        now = time.monotonic()
        statuses = {**self._statuses, self._rank: self._capture(True)}
        arrived = {**self._arrived, self._rank: now}
        ages = {rank: now - at for rank, at in arrived.items()}
        return World(statuses, ages, now, self._read_at, self._store_answers)

    def _capture(self, stack: bool) -> RankStatus:
        return capture_status(self._log, stack, self.pinned, self.interruption)

    def _run(self) -> None:
        while True:
            requests, self._requests = self._requests, False
            now, folder = time.monotonic(), STATUS_RECORD.status_folder
            requested = bool(folder) and world_requested(folder, self._rank)
            if requested:
                self._reads_until = now + _STACK_CAPTURE_S
                if now >= self._stacks_until:
                    requests, self._stacks_until = True, now + _STACK_CAPTURE_S
            stack = now < self._stacks_until
            if folder:
                STATUS_RECORD.publish(self._capture(stack or stack_requested(folder)).to_json())
            if self._control is not None and (requests or now >= self._try_again):
                self._use_store(now, stack, requests)
            if requested:
                write_world(folder, self.world())
            self._append_account(now)
            # `request_stacks` takes no lock, so nothing wakes this thread.
            for _ in range(_POLLS_PER_TICK):
                if self._end.wait(TICK / _POLLS_PER_TICK):
                    return
                if self._requests:
                    break

    def _append_account(self, now: float) -> None:
        # No other thread runs during a copy.
        path, cells = STATUS_RECORD.account, tuple(STATUS_RECORD.cells)
        if path and now >= self._line_due:
            append_line(path, {**account_line(cells, "so far", now), **memory_in_use()})
            self._line_due = now + pause_after(cells, now)

    def _use_store(self, now: float, stack: bool, requests: bool) -> None:
        reads = now < self._reads_until
        try:
            self._exchange(now, stack, requests)
            if reads or self.always_reads:
                self._read()
            self._failures, self._store_answers = 0, True
        except StoreUnreachable:
            self._failures, self._store_answers = self._failures + 1, False
        pause = TICK if reads else _PUBLISH_INTERVAL_S
        if self._failures:
            pause = min(TICK * 2**self._failures, _MAX_RETRY_PAUSE_S)
        # Slightly less, because the thread checks the time in ticks.
        self._try_again = now + pause - TICK / 2

    def _exchange(self, now: float, stack: bool, requests: bool) -> None:
        """Publish a status and read whether a rank requests stacks."""
        control = self._control
        assert control is not None
        if requests:
            control.set(_REQUEST_KEY, b"%d %d" % (self._rank, time.monotonic_ns()), _REQUEST_TIMEOUT_S)
        request = control.get_many([_REQUEST_KEY], _REQUEST_TIMEOUT_S).get(_REQUEST_KEY, b"")
        if request != self._last_request:
            self._last_request = request
            self._stacks_until = time.monotonic() + _STACK_CAPTURE_S
            stack = True
        if now >= self._publish_at:
            self._publish_at = now + _PUBLISH_INTERVAL_S
            self._publish(self._capture(stack))

    def _publish(self, status: RankStatus) -> None:
        assert self._control is not None
        self._control.set(_key(self._rank), status.to_json().encode(), _REQUEST_TIMEOUT_S)

    def _read(self) -> None:
        assert self._control is not None
        # Created here, because a rank of a large world reads nothing until a collective hangs.
        keys = [_key(rank) for rank in range(self._world_size)]
        texts = self._control.get_many(keys, _REQUEST_TIMEOUT_S)
        now = time.monotonic()
        statuses, arrived = dict(self._statuses), dict(self._arrived)
        for rank, key in enumerate(keys):
            text = texts.get(key)
            if text is None or text == self._texts.get(rank):
                continue
            status = RankStatus.from_json(text)
            if status is not None:
                self._texts[rank] = text
                statuses[rank], arrived[rank] = status, now
        # Other threads read these while this thread continues, so it replaces them as a whole.
        self._arrived, self._statuses = arrived, statuses
        self._read_at = now


def _key(rank: int) -> str:
    """The key under which a rank writes its status."""
    return f"hang_report/status/{rank}"


@functools.cache
def _monitors_of(_pid: int) -> WeakSet[HangMonitor]:
    """The monitors of this process; they stop when the interpreter ends, before the groups that exist now."""
    monitors: WeakSet[HangMonitor] = WeakSet()

    def stop() -> None:
        for monitor in list(monitors):
            monitor.stop()

    atexit.register(stop)
    return monitors
