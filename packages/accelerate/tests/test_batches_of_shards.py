"""`BatchSamplerShard` over batches that vary in size, and samplers whose epoch a skipped loader keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accel_testing.processes import Processes
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    prepare_data_loader,
)
from accelerate.utils import DataLoaderConfiguration

FIVE = [[0, 1, 2, 3], [4, 5], [6, 7, 8], [9, 10], [11]]


def shards(batches: Any, processes: int, even: bool) -> list[list[list[int]]]:
    every = [BatchSamplerShard(batches, processes, index, even_batches=even) for index in range(processes)]
    drawn = [list(map(list, shard)) for shard in every]
    assert [len(shard) for shard in every] == [len(shard) for shard in drawn]
    return drawn


@pytest.mark.parametrize(
    ("batches", "processes", "expected"),
    [
        (FIVE, 2, [[[0, 1, 2, 3], [6, 7, 8], [11]], [[4, 5], [9, 10], [0, 1, 2, 3]]]),
        (FIVE, 3, [[[0, 1, 2, 3], [9, 10]], [[4, 5], [11]], [[6, 7, 8], [0, 1, 2, 3]]]),
        (FIVE[:4], 2, [[[0, 1, 2, 3], [6, 7, 8]], [[4, 5], [9, 10]]]),
        (FIVE[:2], 3, [[[0, 1, 2, 3]], [[4, 5]], [[0, 1, 2, 3]]]),
        ([[0], [1, 2]], 5, [[[0]], [[1, 2]], [[0]], [[1, 2]], [[0]]]),
    ],
)
def test_the_first_batches_complete_a_step_of_batches_that_vary(
    batches: list[list[int]], processes: int, expected: list[list[list[int]]]
) -> None:
    assert shards(batches, processes, even=True) == expected


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_without_even_batches_nothing_is_added_to_batches_that_vary(processes: int) -> None:
    drawn = shards(FIVE, processes, even=False)
    assert drawn == [FIVE[index::processes] for index in range(processes)]


def test_a_sampler_with_a_batch_size_is_completed_by_single_samples() -> None:
    class Batches(list[list[int]]):
        batch_size = 2

    drawn = shards(Batches([[0, 1], [2, 3], [4]]), 2, even=True)
    assert drawn == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]


class WithEpoch(Sampler[int]):
    """Counts up from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 8 for index in range(8)])


class BatchesWithEpoch(BatchSampler):
    """The same in batches."""

    def __init__(self) -> None:
        super().__init__(WithEpoch(), 2, False)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return ([(index + self.epoch) % 8, (index + 1 + self.epoch) % 8] for index in range(0, 8, 2))


class StreamWithEpoch(IterableDataset[int]):
    """The same as a stream."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 8 for index in range(8)])


def prepared(**configuration: Any) -> Callable[..., Any]:
    configured = DataLoaderConfiguration(**configuration)
    return lambda *args, **kwargs: Accelerator(cpu=True, dataloader_config=configured).prepare(
        DataLoader(*args, **kwargs)
    )


KINDS: dict[str, Callable[..., Any]] = {
    "torch": DataLoader,
    "shard": DataLoaderShard,
    "dispatcher": DataLoaderDispatcher,
    "skipping": SkipDataLoader,
    "prepared": prepared(),
    "prepared, seeded": prepared(use_seedable_sampler=True),
    "prepared, dispatched": prepared(dispatch_batches=True),
    "function": lambda *args, **kwargs: prepare_data_loader(DataLoader(*args, **kwargs), num_processes=1),
}


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [WithEpoch, BatchesWithEpoch, StreamWithEpoch])
def test_a_skipped_loader_stays_in_the_epoch_that_was_set(kind: str, source: type) -> None:
    owner: Any = source()
    if source is StreamWithEpoch:
        if kind == "skipping":
            pytest.skip("the original's SkipDataLoader takes samplers only")
        loader = KINDS[kind](owner, batch_size=2)
    else:
        given = {"batch_sampler": owner} if source is BatchesWithEpoch else {"sampler": owner, "batch_size": 2}
        loader = KINDS[kind](list(range(8)), **given)
    (loader if hasattr(loader, "set_epoch") else owner).set_epoch(1)
    skipped = skip_first_batches(loader, 1)
    assert owner.epoch == 1
    assert [batch.tolist() for batch in skipped] == [[3, 4], [5, 6], [7, 0]]
    assert owner.epoch == 1


def epochs_of_two() -> list[list[int]]:
    sampler = WithEpoch()
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2, sampler=sampler))
    loader.set_epoch(1)
    batches = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)]
    assert sampler.epoch == 1
    return batches


def test_a_skipped_loader_stays_in_its_epoch_on_two_processes(two: Processes) -> None:
    assert two.run(epochs_of_two) == [[[5, 6]], [[7, 0]]]


def split_by_argument() -> tuple[list[str], list[int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        accelerator = Accelerator(cpu=True, split_batches=True)
        loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=4))
    return [str(warning.message) for warning in caught], [len(batch) for batch in loader]


def test_an_argument_that_the_original_ignores_names_the_batches_with_and_without_it(two: Processes) -> None:
    for messages, sizes in two.run(split_by_argument):
        assert sizes == [2, 2]
        assert "give DataLoaderConfiguration(split_batches=True)" in messages[0]
        assert "each of the 2 processes gets 2 of the 4 samples of a batch" in messages[1]
        assert "Accelerate 1.15.0 ignores the argument, and gives each process a batch of 4" in messages[1]


@pytest.mark.usefixtures("fresh_state")
def test_one_process_gets_whole_batches_in_any_case() -> None:
    messages, sizes = split_by_argument()
    assert sizes == [4, 4]
    assert len(messages) == 1
