"""Batches that shrink until they fit the memory of a device, and memory that is given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from accel_state import PartialState
from accel_state.errors import OutOfMemory, SettingError, UnknownKind
from accel_state.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from accel_state.testing.simulated_device import MODULE, NAME, POSSIBLE, simulated_device

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


def test_each_try_is_a_tenth_smaller() -> None:
    call, tried = tries_of(60)
    assert call() == 58
    assert tried == [128, 115, 103, 92, 82, 73, 65, 58]


def test_the_size_that_fitted_is_where_the_next_call_starts() -> None:
    call, tried = tries_of(100, starting_batch_size=110)
    assert [call(), call()] == [99, 99]
    assert tried == [110, 99, 99]


def test_the_next_size_can_be_chosen() -> None:
    call, tried = tries_of(30, starting_batch_size=100, reduce_batch_size_fn=iter([50, 25]).__next__)
    assert call() == 25
    assert tried == [100, 50, 25]


def test_a_choice_that_would_never_end() -> None:
    call, _ = tries_of(30, starting_batch_size=100, reduce_batch_size_fn=lambda: 100)
    with pytest.raises(SettingError, match="would not end"):
        call()


def test_find_executable_batch_size_reaches_zero() -> None:
    call, tried = tries_of(0, starting_batch_size=4)
    with pytest.raises(OutOfMemory, match="No executable batch size found, reached zero") as caught:
        call()
    assert tried == [4, 3, 2, 1]
    assert isinstance(caught.value, RuntimeError)
    assert "CUDA out of memory" in str(caught.value.__cause__)


def test_other_errors_come_through() -> None:
    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size: int) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        run()


def test_the_caller_leaves_the_batch_size_out() -> None:
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


def test_memory_is_released() -> None:
    class Large:
        pass

    first, second = Large(), Large()
    gone = weakref.ref(first)
    first, second = release_memory(first, second)
    assert first is None
    assert second is None
    assert gone() is None
    assert release_memory() == []


@simulated
def test_the_cache_of_the_device_is_asked_to_be_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_device():
        cleared: list[bool] = []
        monkeypatch.setattr(MODULE, "empty_cache", lambda: cleared.append(gc.isenabled()), raising=False)
        clear_device_cache()
        PartialState()
        clear_device_cache(garbage_collection=True)
        assert len(cleared) == 2


@pytest.mark.parametrize(
    ("error", "smaller"),
    [
        (RuntimeError("CUDA out of memory. Tried"), True),
        (RuntimeError("XPU out of memory."), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (torch.OutOfMemoryError("any"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("CUDA out of memory."), False),
    ],
)
def test_errors_after_which_a_smaller_batch_may_fit(error: Exception, smaller: bool) -> None:
    assert should_reduce_batch_size(error) is smaller
