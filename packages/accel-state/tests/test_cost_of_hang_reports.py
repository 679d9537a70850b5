"""What the hang report costs the store: one write a second, and no value read before a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from accel_state.transport.control import ControlStore
from accel_state.watch.calls import CallLog
from accel_state.watch.monitor import ALWAYS_READ_UP_TO, HangMonitor

PATIENT = 250.0


class Counting(ControlStore):
    """A connection that records its requests."""

    def __init__(self, store: HashStore, rank: int) -> None:
        super().__init__(store, rank, secret="of the run")
        self.written: list[str] = []
        self.read: list[str] = []
        self.looked = threading.Semaphore(0)

    def set(self, key: str, value: bytes, timeout: float) -> None:
        self.written.append(key)
        super().set(key, value, timeout)

    def get_many(self, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        found = super().get_many(keys, timeout)
        self.read += found if len(keys) == 1 else keys
        self.looked.release()
        return found

    def looks(self, count: int) -> None:
        for _ in range(count):
            assert self.looked.acquire(timeout=PATIENT)

    def close(self) -> None:
        """The last words are read afterwards."""


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@contextmanager
def monitored(controls: Iterable[Counting], world_size: int) -> Iterator[list[HangMonitor]]:
    monitors = [HangMonitor(CallLog(), control, rank, world_size) for rank, control in enumerate(controls)]
    try:
        yield monitors
    finally:
        for monitor in monitors:
            monitor.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("world_size", [ALWAYS_READ_UP_TO + 1, 1024])
def test_a_rank_writes_once_a_second_and_reads_nothing_without_a_request(store: HashStore, world_size: int) -> None:
    control = Counting(store, 0)
    begun = time.monotonic()
    with monitored([control], world_size):
        control.looks(4)
        # A slower machine writes less often, never more.
        assert len(control.written) <= time.monotonic() - begun + 1
        assert set(control.written) == {"hang_report/status/0"}
        assert control.read == []


def test_a_rank_that_requests_stacks_reads_and_the_others_do_not(store: HashStore) -> None:
    controls = [Counting(store, rank) for rank in range(3)]
    with monitored(controls, 1024) as monitors:
        for control in controls:
            control.looks(1)
        monitors[2].request_stacks()
        wait_for(lambda: sum(seen.has_stack for seen in monitors[2].world().statuses.values()) == len(controls))
        assert [key for key in controls[2].written if key == "hang_report/request"] == ["hang_report/request"]
        for control in controls[:2]:
            assert set(control.read) <= {"hang_report/request"}


def test_ranks_of_small_worlds_read_the_statuses_of_the_others_all_the_time(store: HashStore) -> None:
    controls = [Counting(store, rank) for rank in range(2)]
    with monitored(controls, 2) as monitors:
        wait_for(lambda: len(monitors[0].world().statuses) == 2)
        assert "hang_report/request" not in controls[0].written
