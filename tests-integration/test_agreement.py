"""Any rank fails, all raise; the missing are named within a deadline; the requests to the store stay proportional."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from counting_store import on_all_ranks, simulated_ranks

from accel_ops import agreement
from accel_ops.agreement import StoreBarrier, all_agree, raise_on_any_rank
from accel_state import PartialState, current
from accel_state.errors import CheckpointError, CollectiveError
from accel_state.watch import report
from accel_testing.processes import Processes

PATIENT = 200.0


@pytest.fixture(autouse=True)
def short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads do not publish where they are, so that reports would wait for them in vain."""
    monkeypatch.setattr(report, "_REPLY_TIMEOUT_S", 0.1)


@pytest.fixture(autouse=True)
def patient_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks share the processor, so that a request of one waits for those of all others."""
    monkeypatch.setattr(agreement, "_REPLY_TIMEOUT_S", PATIENT)
    monkeypatch.setattr(agreement, "_MAX_FAREWELL_S", PATIENT)


def barrier(rank: Any, topic: str = "save", deadline: float = PATIENT) -> StoreBarrier:
    return StoreBarrier(rank, topic, "Cannot save.", deadline, CheckpointError)


def works(rank: Any) -> str:
    return barrier(rank).wait("done", str(rank.rank), ",".join, last=True)


def test_all_ranks_get_the_combined_value_of_rank_0() -> None:
    def save(rank: Any) -> list[str]:
        meeting = barrier(rank)
        name = meeting.wait("open", f"folder-{rank.rank}")
        return [name, meeting.wait("write", str(rank.rank), ",".join, last=True)]

    ranks = simulated_ranks(3)
    for _ in range(3):
        assert on_all_ranks(ranks, save) == [["folder-0", "0,1,2"]] * 3


def test_values_are_combined_on_the_first_rank() -> None:
    def combined(rank: Any) -> str:
        return barrier(rank).wait("done", "", lambda _: f"on rank {rank.rank}", last=True)

    assert on_all_ranks(simulated_ranks(3), combined) == ["on rank 0"] * 3


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
    ranks = simulated_ranks(3)
    outcomes = on_all_ranks(ranks, save_failing(failing, error))
    assert outcomes[failing] is error
    for rank in {0, 1, 2} - {failing}:
        assert isinstance(outcomes[rank], CheckpointError)
        assert f"Process {failing} failed: {type(error).__name__}: {error}" in str(outcomes[rank])
    assert on_all_ranks(ranks, works) == ["0,1,2"] * 3


def test_a_typed_error_keeps_its_class_and_remedy() -> None:
    error = CollectiveError("Cannot load.", "A file is damaged.", "Load an older one.")
    outcomes = on_all_ranks(simulated_ranks(2), save_failing(1, error))
    assert type(outcomes[0]) is CollectiveError
    assert outcomes[0].remedy == "Load an older one."
    assert "Process 1 failed: A file is damaged." in str(outcomes[0])


def test_an_error_of_combine_is_raised_on_all_ranks() -> None:
    def refuse(values: Any) -> str:
        raise CheckpointError("Cannot save.", "They differ.", "Give all the same.")

    ranks = simulated_ranks(3)
    outcomes = on_all_ranks(ranks, lambda rank: barrier(rank).wait("done", "", refuse, last=True))
    assert all("They differ" in str(outcome) for outcome in outcomes)
    assert on_all_ranks(ranks, works) == ["0,1,2"] * 3


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_missing_rank_is_named_and_takes_part_in_later_operations(absent: int) -> None:
    ranks = simulated_ranks(3)
    present = [rank for rank in ranks if rank.rank != absent]
    for _ in range(2):
        outcomes = on_all_ranks(present, lambda rank: barrier(rank, deadline=1.0).wait("done", last=True))
        for outcome in outcomes:
            assert isinstance(outcome, CheckpointError)
            assert f"Process {absent} did not arrive within 1 s" in str(outcome)
    # The absent one has taken part in two operations less.
    assert on_all_ranks(ranks, works) == ["0,1,2"] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_arrives_after_the_deadline_raises(late: int) -> None:
    given_up = threading.Event()

    def save(rank: Any) -> None:
        if rank.rank == late:
            given_up.wait(PATIENT)
        try:
            barrier(rank, deadline=0.5).wait("done", last=True)
        finally:
            given_up.set()

    for outcome in on_all_ranks(simulated_ranks(2), save):
        assert isinstance(outcome, CheckpointError)
        assert "did not arrive within 0.5 s" in str(outcome)


def test_a_late_rank_raises_the_earlier_failure_of_another() -> None:
    ranks = simulated_ranks(3)
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

    outcomes = on_all_ranks(ranks, late)
    assert all("disk full" in str(outcome) for outcome in outcomes)
    assert all("disk full" in str(outcome) for outcome in on_all_ranks(ranks, save))
    assert on_all_ranks(ranks, works) == ["0,1,2"] * 3


def test_check_raises_a_reported_failure_without_waiting() -> None:
    first, second = (barrier(rank) for rank in simulated_ranks(2))
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
    ranks = simulated_ranks(3)

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

    assert on_all_ranks(ranks, both) == [["a0,a1,a2", "b0,b1,b2"]] * 3


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_an_agreement_takes_each_rank_four_requests_and_rank_0_one_for_each_rank(size: int) -> None:
    ranks = simulated_ranks(size)
    assert on_all_ranks(ranks, lambda rank: barrier(rank).wait("done", "", last=True)) == [""] * size
    assert max(rank.count for rank in ranks[1:]) <= 4
    assert ranks[0].count <= size + 8
    assert ranks[0].memory.values == {}


def test_an_operation_of_five_phases_takes_less_than_five_agreements() -> None:
    ranks = simulated_ranks(16)

    def save(rank: Any) -> None:
        meeting = barrier(rank)
        for phase in ("open", "enter", "write", "complete", "commit"):
            meeting.wait(phase, str(rank.rank), last=phase == "commit")

    assert on_all_ranks(ranks, save) == [None] * 16
    assert max(rank.count for rank in ranks[1:]) <= 5 * 4
    assert ranks[0].count <= 5 * (16 + 8)
    assert ranks[0].memory.values == {}


def test_waiting_takes_no_further_requests() -> None:
    ranks = simulated_ranks(3)

    def late(rank: Any) -> None:
        if rank.rank == 2:
            time.sleep(2.0)
        barrier(rank).wait("done", last=True)

    assert on_all_ranks(ranks, late) == [None] * 3
    assert max(rank.count for rank in ranks[1:]) <= 4
    assert ranks[0].count <= 3 + 8


@pytest.mark.parametrize("size", [2, 64])
def test_a_failure_takes_the_rank_that_fails_as_many_requests_as_there_are_ranks(size: int) -> None:
    ranks = simulated_ranks(size)

    def fail(rank: Any) -> None:
        with (meeting := barrier(rank)).reporting():
            if rank.rank == 1:
                raise OSError("disk full")
        meeting.wait("done", last=True)

    assert all("disk full" in str(outcome) for outcome in on_all_ranks(ranks, fail))
    assert max(rank.count for rank in ranks) <= 2 * size + 12
    assert on_all_ranks(ranks, works) == [",".join(map(str, range(size)))] * size
    assert ranks[0].memory.values == {}


def test_a_failure_is_raised_while_another_rank_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MAX_FAREWELL_S", 0.2)
    ranks = simulated_ranks(3)
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

    assert all("disk full" in str(outcome) for outcome in on_all_ranks(ranks, one_stays_away))


def test_values_that_differ_are_named_on_all_ranks() -> None:
    ranks = simulated_ranks(4)
    same = on_all_ranks(ranks, lambda rank: all_agree(rank, "seed", "7", "Cannot begin."))
    assert same == ["7"] * 4
    for outcome in on_all_ranks(ranks, lambda rank: all_agree(rank, "seed", str(rank.rank // 3), "Cannot begin.")):
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


def test_ranks_that_contribute_nothing_to_a_phase_only_read_its_result() -> None:
    ranks = simulated_ranks(8)

    def work(rank: Any) -> list[str]:
        meeting = barrier(rank)
        meeting.wait("begin")
        before = rank.count
        named = meeting.wait("some", str(rank.rank), ",".join, only=(0, 3, 5))
        taken = rank.count - before
        return [named, meeting.wait("first", str(rank.rank), ",".join, last=True, only=(0,)), str(taken)]

    outcomes = on_all_ranks(ranks, work)
    assert [outcome[:2] for outcome in outcomes] == [["0,3,5", "0"]] * 8
    assert [outcome[2] for outcome in outcomes[1:]] == ["1", "1", "2", "1", "2", "1", "1"]
    assert ranks[0].memory.values == {}


def test_a_rank_that_contributes_nothing_to_a_phase_can_fail_it() -> None:
    ranks = simulated_ranks(4)

    def work(rank: Any) -> str:
        meeting = barrier(rank)
        meeting.wait("begin")
        with meeting.reporting():
            if rank.rank == 2:
                raise OSError("disk full")
            if rank.rank == 1:
                time.sleep(0.5)
        return meeting.wait("some", only=(0, 1), last=True)

    assert all("disk full" in str(outcome) for outcome in on_all_ranks(ranks, work))


def test_a_missing_rank_of_those_that_contribute_is_named() -> None:
    ranks = simulated_ranks(4)

    def work(rank: Any) -> str:
        meeting = barrier(rank, deadline=1.0)
        meeting.wait("begin")
        return "gone" if rank.rank == 3 else meeting.wait("some", only=(0, 1, 3), last=True)

    outcomes = on_all_ranks(ranks, work)
    assert outcomes[3] == "gone"
    assert all("Process 3 did not arrive within 1 s" in str(outcome) for outcome in outcomes[:3])
