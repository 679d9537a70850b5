"""The collectives between 64 ranks, as threads of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_ops import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
)
from accel_ops.agreement import StoreBarrier
from accel_state import PartialState, current
from accel_state.errors import AccelError, ShapeMismatch, UnknownKind
from accel_testing.fresh import fresh
from accel_testing.threads import run_as_threads

WORLD = 64


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


def nested() -> tuple[Any, ...]:
    rank = PartialState(cpu=True).process_index
    data = {"x": torch.tensor([rank, -rank]), "y": [torch.tensor(float(rank))]}
    gathered = gather(data)
    total = reduce(data["y"], "sum")[0].item()
    most = reduce(data["x"], "max").tolist()
    sent = broadcast({"z": torch.tensor([rank])}, src=3)["z"].item()
    padded = pad_across_processes(torch.ones(rank % 5 + 1)).shape[0]
    mine = scatter(torch.arange(WORLD) if rank == 5 else None, src=5).item()
    return gathered["x"].tolist(), gathered["y"][0].tolist(), total, most, sent, padded, mine


def test_tensors_between_64_ranks() -> None:
    everyone = [number for rank in range(WORLD) for number in (rank, -rank)]
    for rank, found in enumerate(run_as_threads(WORLD, nested)):
        total = WORLD * (WORLD - 1) / 2
        assert found == (everyone, [float(one) for one in range(WORLD)], total, [WORLD - 1, 0], 3, 5, rank)


def objects() -> tuple[list[Any], list[Any]]:
    rank = PartialState(cpu=True).process_index
    names = gather_object([f"rank {rank}"] * (rank % 3))
    return names, broadcast_object_list([rank, {"from": rank}], src=WORLD - 1)


def test_objects_between_64_ranks() -> None:
    names = [f"rank {rank}" for rank in range(WORLD) for _ in range(rank % 3)]
    assert run_as_threads(WORLD, objects) == [(names, [WORLD - 1, {"from": WORLD - 1}])] * WORLD


def one_of_another_shape() -> str:
    rank = PartialState(cpu=True).process_index
    with pytest.raises(ShapeMismatch) as raised:
        gather(torch.ones(3 if rank == 40 else 2))
    return str(raised.value)


def test_a_shape_that_differs_is_named_on_all_64_ranks() -> None:
    told = set(run_as_threads(WORLD, one_of_another_shape))
    assert len(told) == 1
    assert "(3,) torch.float32 on rank 40" in told.pop()


def one_cannot_take_part() -> str:
    rank = PartialState(cpu=True).process_index
    with pytest.raises(UnknownKind if rank == 7 else ShapeMismatch) as raised:
        gather("text" if rank == 7 else torch.ones(2))
    return str(raised.value)


def test_a_rank_that_cannot_take_part_is_named_on_all_others() -> None:
    told = run_as_threads(WORLD, one_cannot_take_part)
    assert all("rank 7 could not take part" in text for rank, text in enumerate(told) if rank != 7)


def agreement(fails: int | None) -> str:
    process = PartialState(cpu=True)._process
    barrier = StoreBarrier(process, "test", "Cannot test.", 60)
    try:
        with barrier.reporting():
            if process.rank == fails:
                raise MemoryError("of rank 9")
        return barrier.wait("ranks", str(process.rank), lambda values: "+".join(values), last=True)
    except (AccelError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def test_64_ranks_agree_or_raise_together() -> None:
    assert set(run_as_threads(WORLD, agreement, None)) == {"+".join(map(str, range(WORLD)))}
    told = run_as_threads(WORLD, agreement, 9)
    assert told[9] == "MemoryError: of rank 9"
    assert all("Process 9 failed: MemoryError: of rank 9" in text for rank, text in enumerate(told) if rank != 9)


def test_simulated_ranks_return_the_value_of_this_rank() -> None:
    torch.distributed.init_process_group("fake", rank=2, world_size=5, store=FakeStore())
    state = PartialState(cpu=True)
    assert gather(torch.tensor([4])).tolist() == [4] * 5
    barrier = StoreBarrier(current.process(), "test", "Cannot test.", 5)
    assert barrier.wait("ranks", str(state.process_index), ",".join, last=True) == "2,2,2,2,2"
