"""Ranks as threads with one store in memory, which counts the requests of each rank.

With them a test in one process counts the store requests of an operation of a thousand ranks:

    ranks = simulated_ranks(1024)
    on_all_ranks(ranks, lambda rank: StoreBarrier(rank, "save", "Cannot save.").wait("done", last=True))
    assert max(rank.count for rank in ranks[1:]) <= 4
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_state.topology import Topology
from accel_state.transport.base import LocalTransport
from accel_state.transport.control import ControlStore

__all__ = ("CountingStore", "SimulatedRank", "on_all_ranks", "simulated_ranks")

_PATIENT: Final = 200.0


class _Memory:
    """The shared state of one store: its values, and the ranks that wait for keys."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, list[threading.Event]] = {}
        self.lock = threading.Lock()


class CountingStore:
    """The store of one rank, which counts its requests and answers them as torch's stores do."""

    def __init__(self, memory: _Memory, requests: Counter[str]) -> None:
        self.memory, self.requests = memory, requests
        self.timeout = timedelta(seconds=_PATIENT)

    def clone(self) -> CountingStore:
        return CountingStore(self.memory, self.requests)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: bytes) -> None:
        self.requests["set"] += 1
        with self.memory.lock:
            self._put(key, value)

    def compare_set(self, key: str, expected: str, value: bytes) -> bytes:
        assert expected == ""
        self.requests["compare_set"] += 1
        with self.memory.lock:
            if key not in self.memory.values:
                self._put(key, value)
            return self.memory.values[key]

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        with self.memory.lock:
            count = int(self.memory.values.get(key, b"0")) + amount
            self._put(key, b"%d" % count)
            return count

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.memory.values for key in keys)

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self._wait([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        return self._wait(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.requests["wait"] += 1
        self._wait(keys)

    def delete_key(self, key: str) -> None:
        self.requests["delete_key"] += 1
        self.memory.values.pop(key, None)

    def _put(self, key: str, value: bytes) -> None:
        self.memory.values[key] = value
        for event in self.memory.waiting.pop(key, ()):
            event.set()

    def _wait(self, keys: list[str]) -> list[bytes]:
        until = time.monotonic() + self.timeout.total_seconds()
        for key in keys:
            event = threading.Event()
            with self.memory.lock:
                if key in self.memory.values:
                    continue
                self.memory.waiting.setdefault(key, []).append(event)
            if not event.wait(max(until - time.monotonic(), 0.0)):
                raise dist.DistStoreError("the wait timed out")
        with self.memory.lock:
            if not all(key in self.memory.values for key in keys):
                raise dist.DistStoreError("a key was deleted")
            return [self.memory.values[key] for key in keys]


class _Transport(LocalTransport):
    """The transport of one rank, only for messages."""

    def __init__(self, rank: int, world_size: int, store: CountingStore) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world_size, self._store = rank, world_size, store
        self._messages = ControlStore(store, rank, secret="s")

    def store(self) -> Any:
        return self._store

    def control(self) -> ControlStore:  # type: ignore[override]
        return self._messages


class SimulatedRank:
    """The part of a `Process` that `StoreBarrier` and a save use.

    Attributes:
        requests: number of requests of this rank, by kind.
    """

    def __init__(self, rank: int, world_size: int, ranks_per_node: int, memory: _Memory) -> None:
        self.rank, self.world_size = rank, world_size
        node, local = divmod(rank, ranks_per_node)
        self.topology: Final = Topology(rank, world_size, local, ranks_per_node, node)
        self.requests: Counter[str] = Counter()
        self.memory = memory
        self.transport = _Transport(rank, world_size, CountingStore(memory, self.requests))

    @property
    def count(self) -> int:
        """Number of requests of all kinds."""
        return self.requests.total()


def simulated_ranks(size: int, ranks_per_node: int | None = None) -> list[Any]:
    """Create the ranks of one run.

    Args:
        size: number of ranks.
        ranks_per_node: number of ranks on each node; all by default.

    Returns:
        A `SimulatedRank` for each, in order; typed as `Any`, because it lacks most of a `Process`.
    """
    memory = _Memory()
    return [SimulatedRank(rank, size, ranks_per_node or size, memory) for rank in range(size)]


def on_all_ranks(ranks: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Call `work` with each rank, all at the same time, each in its own thread.

    Returns:
        The results or the exceptions, in the order of the ranks.
    """

    def outcome(rank: Any) -> Any:
        try:
            return work(rank)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))
