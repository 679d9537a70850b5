"""Our own collectives over gloo have the results of gloo's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import PartialState, current
from accel_state.transport.base import Transport
from accel_state.transport.torch_dist import TorchDistTransport
from accel_testing.processes import Processes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
LARGE = 256 * 1024
SIZES = (0, 1, 7, LARGE)


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest, processes: Callable[[int], Processes]) -> Processes:
    return processes(request.param)


def joined() -> Transport:
    PartialState(cpu=True, timeout=100)
    return current.process().transport


def value(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size) % 5 + rank).to(dtype)


def gathers() -> None:
    transport = joined()
    for dtype in DTYPES:
        for size in SIZES:
            for header in (False, True):
                output = torch.zeros(transport.world_size * size, dtype=dtype)
                transport.all_gather(output, value(transport.rank, size, dtype), header=header).wait()
                wanted = torch.cat([value(rank, size, dtype) for rank in range(transport.world_size)])
                assert torch.equal(output, wanted), (dtype, size, header)


def gathers_in_inference_mode() -> None:
    transport = joined()
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            output = torch.zeros(transport.world_size)
            transport.all_gather(output, torch.full((1,), float(transport.rank))).wait()
            assert output.tolist() == list(range(transport.world_size))


def gathers_at_the_same_time() -> None:
    transport, count = joined(), 6
    outputs = [torch.zeros(transport.world_size, dtype=torch.int64) for _ in range(count)]
    given = [torch.tensor([100 * index + transport.rank]) for index in range(count)]
    works = [transport.all_gather(output, one, header=True) for output, one in zip(outputs, given, strict=True)]
    for index, (work, output) in enumerate(zip(works, outputs, strict=True)):
        work.wait()
        assert output.tolist() == [100 * index + rank for rank in range(transport.world_size)]


def reduces() -> None:
    transport = joined()
    combine: dict[Any, Any] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        for size in SIZES:
            everyones = torch.stack([value(rank, size, dtype) for rank in range(transport.world_size)])
            for operation, function in combine.items():
                wanted = function(everyones, 0).to(dtype)
                mine = value(transport.rank, size, dtype)
                into = torch.zeros_like(mine)
                transport.all_reduce(mine, operation, into).wait()
                assert torch.equal(into, wanted), (dtype, size, operation)
                assert torch.equal(mine, value(transport.rank, size, dtype))
                transport.all_reduce(mine, operation).wait()
                assert torch.equal(mine, wanted), (dtype, size, operation)


def sums_of_what_needs_rounding() -> list[float]:
    transport = joined()
    torch.manual_seed(transport.rank)
    mine = torch.randn(1000) * torch.logspace(-6, 6, 1000)
    transport.all_reduce(mine).wait()
    return mine.tolist()


def broadcasts() -> None:
    transport = joined()
    for source in range(transport.world_size):
        for dtype in DTYPES:
            for size in SIZES:
                mine = value(transport.rank, size, dtype)
                transport.broadcast(mine, source).wait()
                assert torch.equal(mine, value(source, size, dtype)), (source, dtype, size)


@pytest.mark.parametrize(
    "calls",
    [gathers, gathers_in_inference_mode, gathers_at_the_same_time, reduces, broadcasts],
    ids=lambda c: c.__name__,
)
def test_gloo_collectives_return_the_right_values_on_every_process(group: Processes, calls: Any) -> None:
    group.run(calls)


def test_sums_are_bitwise_equal_on_all_processes(group: Processes) -> None:
    first, *others = group.run(sums_of_what_needs_rounding)
    assert all(other == first for other in others)


def other_is_gone(operation: str) -> list[str]:
    transport = joined()
    if transport.rank == 1:
        os._exit(0)
    large = torch.ones(LARGE)
    start: dict[str, Any] = {
        "all_gather": lambda: transport.all_gather(torch.empty(2 * large.numel()), large),
        "all_reduce": lambda: transport.all_reduce(large),
        "broadcast": lambda: transport.broadcast(large, 1),
    }
    said = []
    for _ in range(2):
        work = start[operation]()
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                work.wait()
            said.append(str(caught.value))
        assert work.is_completed()
    return said


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce", "broadcast"])
def test_a_process_that_is_gone_makes_every_wait_raise_and_not_the_start(two: Processes, operation: str) -> None:
    first, second = two.outcomes(other_is_gone, operation)
    assert second.exitcode == 0
    assert first.ok, str(first)
    assert all(first.value)


def owns_its_group() -> bool:
    """A group of the script's own is not mixed up with ours."""
    transport = joined()
    mine = torch.ones(LARGE)
    output = torch.empty(transport.world_size * mine.numel())
    ours = transport.all_gather(output, mine)
    theirs = torch.ones(1)
    dist.all_reduce(theirs)
    ours.wait()
    return bool(theirs.item() == transport.world_size and output.eq(1).all())


def test_messages_do_not_mix_with_those_of_the_script(group: Processes) -> None:
    assert all(group.run(owns_its_group))


def makes_a_store() -> str:
    joined()
    # As over a group of MPI, which has none.
    transport = TorchDistTransport(torch.device("cpu"), timedelta(seconds=100))
    store = transport.store()
    assert store is not None
    if transport.rank == 0:
        store.set("key", "from rank 0")
    said = bytes(store.get("key")).decode()
    transport.barrier()  # rank 0 hosts the store
    return said


def test_rank_0_hosts_a_store_for_a_group_without_one(group: Processes) -> None:
    assert set(group.run(makes_a_store)) == {"from rank 0"}
