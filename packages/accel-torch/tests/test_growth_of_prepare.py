"""What `prepare` costs with more parameters and with more processes, in calls and in bytes of Python's memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_testing.fresh import fresh
from accel_testing.profiling import count_calls
from accel_torch import Accelerator


def calls_in(work: Callable[[], Any]) -> int:
    """Calls of Python functions."""
    return count_calls(work, builtins=False)


def bytes_in(work: Callable[[], Any]) -> int:
    """The most bytes that Python held at once."""
    gc.collect()
    tracemalloc.start()
    try:
        made = work()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del made
    return peak


def cost(measure: Callable[[Callable[[], Any]], int], layers: int, processes: int = 1) -> int:
    """That of preparing a model with an optimizer, as one rank of a world that moves nothing."""
    with fresh():
        plugin = None
        if processes > 1:
            dist.init_process_group("fake", rank=processes - 1, world_size=processes, store=FakeStore())
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 1024) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return measure(lambda: accelerator.prepare(model, optimizer))


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("measure", [calls_in, bytes_in])
def test_prepare_grows_linearly_with_the_number_of_parameters(
    measure: Callable[[Callable[[], Any]], int], processes: int
) -> None:
    cost(measure, 4, processes)  # What is loaded and cached once is left out.
    small, large = cost(measure, 40, processes), cost(measure, 160, processes)
    assert small < large <= 4 * small


def test_prepare_costs_the_same_on_any_number_of_processes() -> None:
    few, many = ([cost(calls_in, 8, processes) for _ in range(3)][-1] for processes in (8, 1024))
    assert many == pytest.approx(few, rel=0.02)
