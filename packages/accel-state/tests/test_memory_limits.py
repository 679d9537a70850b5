"""Errors that say that memory was too little, and memory that is given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accel_state import PartialState
from accel_state.memory import clear_device_cache, release_memory, should_reduce_batch_size
from accel_testing.simulated_device import MODULE, POSSIBLE, simulated_device

pytestmark = pytest.mark.usefixtures("fresh_state")


simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")


def test_release_memory_drops_the_objects() -> None:
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
def test_clear_device_cache_calls_the_device_family(monkeypatch: pytest.MonkeyPatch) -> None:
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
