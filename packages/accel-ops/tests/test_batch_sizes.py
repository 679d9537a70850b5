"""Batches that shrink until they fit the memory of a device, in one process and on all ranks together."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from accel_ops import find_executable_batch_size
from accel_state import PartialState
from accel_state.errors import CollectiveError, OutOfMemory, SettingError, UnknownKind
from accel_testing.processes import Processes
from accel_testing.simulated_device import MODULE, NAME, POSSIBLE, simulated_device

pytestmark = pytest.mark.usefixtures("fresh_state")


simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")


def tries_of(limit: int, **options: Any) -> tuple[Any, list[int]]:
    tried: list[int] = []

    def run(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 MiB")
        return batch_size

    return find_executable_batch_size(run, **options), tried


def test_each_batch_size_is_a_tenth_smaller() -> None:
    call, tried = tries_of(60)
    assert call() == 58
    assert tried == [128, 115, 103, 92, 82, 73, 65, 58]


def test_the_next_call_starts_with_the_batch_size_that_fitted() -> None:
    call, tried = tries_of(100, starting_batch_size=110)
    assert [call(), call()] == [99, 99]
    assert tried == [110, 99, 99]


def test_reduce_batch_size_fn_chooses_the_next_size() -> None:
    call, tried = tries_of(30, starting_batch_size=100, reduce_batch_size_fn=iter([50, 25]).__next__)
    assert call() == 25
    assert tried == [100, 50, 25]


def test_reduce_batch_size_fn_must_return_a_smaller_size() -> None:
    call, _ = tries_of(30, starting_batch_size=100, reduce_batch_size_fn=lambda: 100)
    with pytest.raises(SettingError, match="would never end"):
        call()


def test_find_executable_batch_size_reaches_zero() -> None:
    call, tried = tries_of(0, starting_batch_size=4)
    with pytest.raises(OutOfMemory, match="No executable batch size found, reached zero") as caught:
        call()
    assert tried == [4, 3, 2, 1]
    assert isinstance(caught.value, RuntimeError)
    assert "CUDA out of memory" in str(caught.value.__cause__)


def test_other_errors_are_raised_unchanged() -> None:
    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size: int) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        run()


def test_passing_the_batch_size_is_refused() -> None:
    @find_executable_batch_size
    def run(batch_size: int, epochs: int = 1) -> tuple[int, int]:
        return batch_size, epochs

    assert run(epochs=3) == (128, 3)
    assert run(2) == (128, 2)
    with pytest.raises(UnknownKind, match=r"Batch size was passed into `run`.*`run\(epochs=2\)`"):
        run(64, 2, 3)
    with pytest.raises(UnknownKind, match="first argument"):
        find_executable_batch_size(lambda: None)()
    with pytest.raises(UnknownKind, match="missing a required argument: 'text'"):
        find_executable_batch_size(lambda size, text: None)()


@simulated
def test_a_smaller_batch_fits_a_real_limit() -> None:
    held: list[int] = []

    @find_executable_batch_size(starting_batch_size=40)
    def run(batch_size: int) -> int:
        batch = torch.ones(batch_size, 16, device=NAME)
        work = batch * 2
        held.append(MODULE.memory_allocated())
        return len(work)

    with simulated_device(memory=4096):
        PartialState()
        assert run() == 32
        # The tries before got less far, and what they held was given back.
        assert held == [4096]


def agreed(limits: list[int], fails_on: int | None = None) -> tuple[Any, list[int]]:
    """What the decorated function gives on this rank, whose memory holds its limit of samples, and what was tried."""
    rank = PartialState(cpu=True).process_index
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > limits[rank]:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 MiB")
        if rank == fails_on:
            raise KeyError("labels")
        return batch_size

    return [run(), run()], tried


@pytest.mark.parametrize("limits", [[64, 50, 60], [40, 64, 64], [20, 64, 20]])
def test_all_ranks_take_the_size_that_fits_on_the_smallest(three: Processes, limits: list[int]) -> None:
    answers = three.run(agreed, limits)
    sizes, tried = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert sizes == [tried[-1]] * 2
    assert 0.85 * min(limits) < tried[-1] <= min(limits)
    assert tried[0] == 64


def refused(limits: list[int], fails_on: int | None) -> tuple[str, str]:
    try:
        agreed(limits, fails_on)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_another_error_of_one_rank_is_raised_on_all(two: Processes) -> None:
    answers = two.run(refused, [64, 64], 1)
    assert answers[1] == ("KeyError", "'labels'")
    assert answers[0][0] == CollectiveError.__name__
    assert "Process 1 failed: KeyError" in answers[0][1]


def test_all_ranks_learn_that_not_even_one_sample_fits(two: Processes) -> None:
    for kind, message in two.run(refused, [0, 64], None):
        assert kind == OutOfMemory.__name__
        assert "No executable batch size found" in message


def started_inside(_: int) -> list[int]:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        rank = PartialState(cpu=True).process_index
        if rank == 1 and batch_size > 6:
            raise torch.OutOfMemoryError
        return batch_size

    assert int(os.environ["WORLD_SIZE"]) == 2
    run()
    return tried


def test_the_function_may_start_the_run(two: Processes) -> None:
    assert two.run(started_inside, 0) == [[8, 7, 6], [8, 7, 6]]
