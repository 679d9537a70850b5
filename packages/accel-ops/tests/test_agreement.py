"""Any rank fails, all raise; the missing are named within a deadline; the requests to the store stay proportional."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_ops import agreement
from accel_ops.agreement import StoreBarrier, all_agree, raise_on_any_rank
from accel_state import PartialState, current
from accel_state.errors import CheckpointError, CollectiveError
from accel_state.hang_report import report
from accel_state.testing.processes import Processes
from accel_state.transport.base import LocalTransport
from accel_state.transport.control import ControlStore

PATIENT = 60.0


@pytest.fixture(autouse=True)
def short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads do not publish where they are, so that reports would wait for them in vain."""
    monkeypatch.setattr(report, "_LONGEST_WAIT", 0.1)


class Memory:
    """What all ranks see of one store: values, and who waits for which."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, list[threading.Event]] = {}
        self.lock = threading.Lock()


class CountingStore:
    """The store of one rank, which counts its requests and answers them as torch's stores do."""

    def __init__(self, memory: Memory, requests: Counter[str]) -> None:
        self.memory, self.requests = memory, requests
        self.timeout = timedelta(seconds=PATIENT)

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
                raise dist.DistStoreError("time is up")
        with self.memory.lock:
            if not all(key in self.memory.values for key in keys):
                raise dist.DistStoreError("a key was deleted")
            return [self.memory.values[key] for key in keys]


class Way(LocalTransport):
    """The way of one rank to the others, for messages alone."""

    def __init__(self, rank: int, world_size: int, store: CountingStore) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world_size, self._store = rank, world_size, store

    def store(self) -> Any:
        return self._store

    def control(self) -> ControlStore:  # type: ignore[override]
        return ControlStore(self._store, self.rank, secret="s")


class Rank:
    """What `StoreBarrier` asks of a process; ranks are threads here."""

    def __init__(self, rank: int, world_size: int, memory: Memory) -> None:
        self.rank, self.world_size = rank, world_size
        self.requests: Counter[str] = Counter()
        self.memory = memory
        self.transport = Way(rank, world_size, CountingStore(memory, self.requests))


def world(size: int) -> list[Any]:
    memory = Memory()
    return [Rank(rank, size, memory) for rank in range(size)]


def on_all(ranks: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """What `work` returns or raises on each rank."""

    def outcome(rank: Any) -> Any:
        try:
            return work(rank)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))


def barrier(rank: Any, topic: str = "save", deadline: float = PATIENT) -> StoreBarrier:
    return StoreBarrier(rank, topic, "Cannot save.", deadline, CheckpointError)


def works(rank: Any) -> str:
    return barrier(rank).wait("done", str(rank.rank), ",".join, last=True)


def test_all_get_what_rank_0_made_of_the_values() -> None:
    def save(rank: Any) -> list[str]:
        meeting = barrier(rank)
        name = meeting.wait("open", f"folder-{rank.rank}")
        return [name, meeting.wait("write", str(rank.rank), ",".join, last=True)]

    ranks = world(3)
    for _ in range(3):
        assert on_all(ranks, save) == [["folder-0", "0,1,2"]] * 3


def test_values_are_combined_on_the_first_rank() -> None:
    def combined(rank: Any) -> str:
        return barrier(rank).wait("done", "", lambda _: f"on rank {rank.rank}", last=True)

    assert on_all(world(3), combined) == ["on rank 0"] * 3


def save_failing(failing: int, error: BaseException) -> Callable[[Any], None]:
    def save(rank: Any) -> None:
        meeting = barrier(rank)
        meeting.wait("open")
        with meeting.reporting():
            if rank.rank == failing:
                raise error
        meeting.wait("write", last=True)

    return save


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    "error", [OSError(30, "Read-only file system"), MemoryError("no room"), KeyboardInterrupt("^C")], ids=repr
)
def test_any_exception_of_one_rank_is_raised_on_all(failing: int, error: BaseException) -> None:
    ranks = world(3)
    outcomes = on_all(ranks, save_failing(failing, error))
    assert outcomes[failing] is error
    for rank in {0, 1, 2} - {failing}:
        assert isinstance(outcomes[rank], CheckpointError)
        assert f"Process {failing} failed: {type(error).__name__}: {error}" in str(outcomes[rank])
    assert on_all(ranks, works) == ["0,1,2"] * 3


def test_a_typed_error_keeps_its_class_and_remedy() -> None:
    error = CollectiveError("Cannot load.", "A file is damaged.", "Load an older one.")
    outcomes = on_all(world(2), save_failing(1, error))
    assert type(outcomes[0]) is CollectiveError
    assert outcomes[0].remedy == "Load an older one."
    assert "Process 1 failed: A file is damaged." in str(outcomes[0])


def test_what_rank_0_makes_of_the_values_may_fail_on_all() -> None:
    def refuse(values: Any) -> str:
        raise CheckpointError("Cannot save.", "They differ.", "Give all the same.")

    ranks = world(3)
    outcomes = on_all(ranks, lambda rank: barrier(rank).wait("done", "", refuse, last=True))
    assert all("They differ" in str(outcome) for outcome in outcomes)
    assert on_all(ranks, works) == ["0,1,2"] * 3


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_the_missing_is_named_and_later_operations_meet(absent: int) -> None:
    ranks = world(3)
    present = [rank for rank in ranks if rank.rank != absent]
    for _ in range(2):
        outcomes = on_all(present, lambda rank: barrier(rank, deadline=1.0).wait("done", last=True))
        for outcome in outcomes:
            assert isinstance(outcome, CheckpointError)
            assert f"Process {absent} did not arrive within 1 s" in str(outcome)
    # The absent one has taken part in two operations less.
    assert on_all(ranks, works) == ["0,1,2"] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_past_the_deadline_meets_nobody(late: int) -> None:
    given_up = threading.Event()

    def save(rank: Any) -> None:
        if rank.rank == late:
            given_up.wait(PATIENT)
        try:
            barrier(rank, deadline=0.5).wait("done", last=True)
        finally:
            given_up.set()

    for outcome in on_all(world(2), save):
        assert isinstance(outcome, CheckpointError)
        assert "did not arrive within 0.5 s" in str(outcome)


def test_a_rank_that_comes_after_a_failure_of_another_raises_it() -> None:
    ranks = world(3)
    save = save_failing(1, OSError("disk full"))
    reported = threading.Event()

    def late(rank: Any) -> None:
        if rank.rank == 2:
            reported.wait(PATIENT)
        meeting = barrier(rank)
        try:
            with meeting.reporting():
                if rank.rank == 1:
                    raise OSError("disk full")
        finally:
            if rank.rank == 1:
                reported.set()
        meeting.wait("write", last=True)

    outcomes = on_all(ranks, late)
    assert all("disk full" in str(outcome) for outcome in outcomes)
    assert all("disk full" in str(outcome) for outcome in on_all(ranks, save))
    assert on_all(ranks, works) == ["0,1,2"] * 3


def test_a_failure_that_was_reported_is_seen_without_waiting() -> None:
    first, second = (barrier(rank) for rank in world(2))
    second.check()
    reporting = threading.Thread(target=first.fail, args=(OSError(28, "No space left on device"),))
    reporting.start()

    def look() -> None:
        while reporting.is_alive():
            second.check()

    with pytest.raises(CheckpointError, match="No space left on device"):
        look()
    reporting.join()


def test_two_topics_at_once_do_not_mix() -> None:
    ranks = world(3)

    def both(rank: Any) -> list[str]:
        topics = ["a", "b"] if rank.rank % 2 else ["b", "a"]
        answers = {}

        def run(topic: str) -> None:
            answers[topic] = barrier(rank, topic).wait("done", f"{topic}{rank.rank}", ",".join, last=True)

        threads = [threading.Thread(target=run, args=(topic,)) for topic in topics]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [answers["a"], answers["b"]]

    assert on_all(ranks, both) == [["a0,a1,a2", "b0,b1,b2"]] * 3


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_an_agreement_takes_each_rank_four_requests_and_rank_0_one_for_each_rank(size: int) -> None:
    ranks = world(size)
    assert on_all(ranks, lambda rank: barrier(rank).wait("done", "", last=True)) == [""] * size
    assert max(sum(rank.requests.values()) for rank in ranks[1:]) <= 4
    assert sum(ranks[0].requests.values()) <= size + 8
    assert ranks[0].memory.values == {}


def test_an_operation_of_five_phases_takes_less_than_five_agreements() -> None:
    ranks = world(16)

    def save(rank: Any) -> None:
        meeting = barrier(rank)
        for phase in ("open", "enter", "write", "complete", "commit"):
            meeting.wait(phase, str(rank.rank), last=phase == "commit")

    assert on_all(ranks, save) == [None] * 16
    assert max(sum(rank.requests.values()) for rank in ranks[1:]) <= 5 * 4
    assert sum(ranks[0].requests.values()) <= 5 * (16 + 8)
    assert ranks[0].memory.values == {}


def test_waiting_takes_no_further_requests() -> None:
    ranks = world(3)

    def late(rank: Any) -> None:
        if rank.rank == 2:
            time.sleep(2.0)
        barrier(rank).wait("done", last=True)

    assert on_all(ranks, late) == [None] * 3
    assert max(sum(rank.requests.values()) for rank in ranks[1:]) <= 4
    assert sum(ranks[0].requests.values()) <= 3 + 8


@pytest.mark.parametrize("size", [2, 64])
def test_a_failure_takes_the_rank_that_fails_as_many_requests_as_there_are_ranks(size: int) -> None:
    ranks = world(size)

    def fail(rank: Any) -> None:
        with (meeting := barrier(rank)).reporting():
            if rank.rank == 1:
                raise OSError("disk full")
        meeting.wait("done", last=True)

    assert all("disk full" in str(outcome) for outcome in on_all(ranks, fail))
    assert max(sum(rank.requests.values()) for rank in ranks) <= 2 * size + 12
    assert on_all(ranks, works) == [",".join(map(str, range(size)))] * size
    assert ranks[0].memory.values == {}


def test_a_failure_is_heard_while_another_rank_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_FAREWELL", 0.2)
    ranks = world(3)
    reported = threading.Event()

    def one_stays_away(rank: Any) -> None:
        meeting = barrier(rank)
        if rank.rank == 2:
            reported.wait(PATIENT)
        with meeting.reporting():
            if rank.rank == 1:
                raise OSError("disk full")
        try:
            meeting.wait("done", last=True)
        finally:
            # Rank 0 hears it before rank 2 comes.
            reported.set()

    assert all("disk full" in str(outcome) for outcome in on_all(ranks, one_stays_away))


def test_values_that_differ_are_named_on_all_ranks() -> None:
    ranks = world(4)
    same = on_all(ranks, lambda rank: all_agree(rank, "seed", "7", "Cannot begin."))
    assert same == ["7"] * 4
    for outcome in on_all(ranks, lambda rank: all_agree(rank, "seed", str(rank.rank // 3), "Cannot begin.")):
        assert isinstance(outcome, CollectiveError)
        assert "'0' on ranks 0-2; '1' on rank 3" in str(outcome)


def looked(failing: tuple[int, ...]) -> str:
    rank = PartialState(cpu=True).process_index

    def look() -> str:
        if rank in failing:
            raise CheckpointError(f"Cannot read file {rank}.", "It is damaged.", "Load another.")
        return f"file {rank}"

    try:
        return raise_on_any_rank(current.process(), "look", look, "Cannot read files.", error=CheckpointError)
    except CheckpointError as error:
        return str(error).splitlines()[0]


def test_what_fails_on_one_process_fails_on_all(two: Processes) -> None:
    assert two.run(looked, ()) == ["file 0", "file 1"]
    assert two.run(looked, (1,)) == ["Cannot read file 1."] * 2
    assert two.run(looked, (0, 1)) == ["Cannot read file 0.", "Cannot read file 1."]
