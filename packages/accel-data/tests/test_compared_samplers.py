"""What custom samplers draw is compared between the processes before the first batch of a loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from accel_data import prepare_data_loader
from accel_ops import gather_object
from accel_state import PartialState
from accel_state.errors import DataError
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording

LENGTH = 24


class Drawing(Sampler[int]):
    """Draws from torch's or Python's generator of the process, or from one of its own."""

    def __init__(self, draws: str, seed: int) -> None:
        self.draws, self.own = draws, random.Random(seed)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        indices = list(range(LENGTH))
        if self.draws == "torch":
            return iter(torch.randperm(LENGTH).tolist())
        (random if self.draws == "python" else self.own).shuffle(indices)
        return iter(indices)


class Divided(Sampler[int]):
    """Yields the indices of one process only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return LENGTH // 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, LENGTH, 2))


def loaders(rank: int, seed: int) -> dict[str, DataLoader[Any]]:
    data: Any = range(LENGTH)
    batches = BatchSampler(Drawing("own", seed), 2, False)
    return {
        **{draws: DataLoader(data, 2, sampler=Drawing(draws, seed)) for draws in ("torch", "python", "own")},
        "batches": DataLoader(data, batch_sampler=Listed(batches)),
        "divided": DataLoader(data, 2, sampler=Divided(rank)),
    }


class Listed(BatchSampler):
    """A custom batch sampler."""

    def __init__(self, batches: BatchSampler) -> None:
        super().__init__(batches.sampler, batches.batch_size, False)
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def first_epochs(seeds_differ: bool, options: dict[str, Any]) -> dict[str, Any]:
    rank = PartialState(cpu=True).process_index
    seed = 7 + rank * seeds_differ
    found: dict[str, Any] = {}
    for kind, plain in loaders(rank, seed).items():
        random.seed(seed)
        torch.manual_seed(seed)
        loader: Any = prepare_data_loader(plain, **options)
        try:
            found[kind] = [[sample for batch in loader for sample in batch.tolist()] for _ in range(2)]
        except DataError as error:
            found[kind] = str(error)
    # No process is left behind.
    assert gather_object([rank]) == list(range(PartialState().num_processes))
    return found


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("world", ["two", "three"])
def test_a_sampler_that_differs_is_an_error_on_all_processes(
    world: str, split_batches: bool, request: pytest.FixtureRequest
) -> None:
    processes: Processes = request.getfixturevalue(world)
    options = {"split_batches": split_batches and world == "two"}
    for rank, found in enumerate(processes.run(first_epochs, True, options)):
        for kind, text in found.items():
            assert f"Process {rank} of {len(found) and (2 if world == 'two' else 3)}, loader over range" in text, kind
            assert "yields other indices on process 1 than on process 0" in text, kind
            assert ("Listed" if kind == "batches" else "Divided" if kind == "divided" else "Drawing") in text, kind
            assert "sharding='already'" in text, kind


def test_equal_draws_are_read_once_each(two: Processes) -> None:
    first, second = two.run(first_epochs, False, {})
    for kind in ("torch", "python", "own", "batches"):
        for epoch in range(2):
            assert sorted(first[kind][epoch] + second[kind][epoch]) == list(range(LENGTH)), kind


def already_divided() -> list[list[int]]:
    rank = PartialState(cpu=True).process_index
    data: Any = range(LENGTH)
    found = []
    for sampler, options in (
        (Divided(rank), {"sharding": "already"}),
        (DistributedSampler(data, shuffle=False), {}),
    ):
        loader: Any = prepare_data_loader(DataLoader(data, 2, sampler=sampler), **options)
        found.append([sample for batch in loader for sample in batch.tolist()])
    return found


def test_declared_and_torchs_own_division_are_read_as_they_are(two: Processes) -> None:
    for rank, found in enumerate(two.run(already_divided)):
        assert found == [list(range(rank, LENGTH, 2))] * 2


def counted_collectives() -> list[int]:
    """Collectives of two epochs of a custom sampler, and of one of torch's."""
    PartialState(cpu=True)
    data: Any = range(LENGTH)
    counts = []
    custom: Any = prepare_data_loader(DataLoader(data, 2, sampler=Drawing("own", 0)))
    torchs: Any = prepare_data_loader(DataLoader(data, 2, shuffle=True), use_seedable_sampler=True, data_seed=0)
    for loader in (custom, custom, torchs):
        with recording() as records:
            list(loader)
        counts.append(len(records))
    return counts


def test_the_comparison_is_one_collective_in_the_first_epoch(two: Processes) -> None:
    assert two.run(counted_collectives) == [[1, 0, 0]] * 2
