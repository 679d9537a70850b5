"""Random draws inside the data, the same after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import prepare_data_loader, skip_first_batches

pytestmark = pytest.mark.usefixtures("fresh_state")


def draw(index: int) -> torch.Tensor:
    return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))])


class Augmented(Dataset[torch.Tensor]):
    note = "kept"

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw(index)


class AtOnce(Augmented):
    """Would read many samples at once, which cannot be seeded one by one."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        raise AssertionError("read at once")


class AugmentedStream(IterableDataset[torch.Tensor]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(11):
            yield draw(100 * self.epoch + index)


def prepared(data: Any, seed: int | None = 5, **options: Any) -> Any:
    how = {"workers": 0, "batch_size": 2, "processes": 1, "index": 0, "restore": True} | options
    shuffle = None if isinstance(data, IterableDataset) else True
    workers = how["workers"]
    plain = DataLoader(
        data,
        batch_size=how["batch_size"],
        shuffle=shuffle,
        num_workers=workers,
        persistent_workers=workers > 0 and bool(shuffle),
    )
    return prepare_data_loader(
        plain,
        num_processes=how["processes"],
        process_index=how["index"],
        seed_samples=True,
        data_seed=seed,
        use_seedable_sampler=True,
        restore_position=how["restore"],
    )


def epoch_of(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("data", [Augmented(), AtOnce(), AugmentedStream()], ids=["indices", "at once", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [2, None])
def test_draws_are_the_same_after_a_resume_and_differ_between_epochs(data: Any, workers: int, batch_size: Any) -> None:
    options = {"workers": workers, "batch_size": batch_size}
    whole = prepared(data, **options)
    epochs = [epoch_of(whole), epoch_of(whole)]
    assert epochs[0] != epochs[1]
    interrupted = prepared(data, **options)
    for number, _ in enumerate(interrupted, 1):
        if number == 3:
            saved = interrupted.state_dict()
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    for by_hand in (False, True):
        loader = prepared(data, restore=not by_hand, **options)
        loader.load_state_dict(saved)
        current = skip_first_batches(loader, 3) if by_hand else loader
        assert [epoch_of(current), epoch_of(loader)] == [epochs[0][3:], epochs[1]]


def test_the_number_of_processes_and_workers_does_not_matter() -> None:
    def samples(loaders: list[Any]) -> list[Any]:
        return sorted(sample for loader in loaders for batch in loader for sample in batch.tolist())

    alone = samples([prepared(Augmented())])
    shared = [prepared(Augmented(), processes=2, index=index, workers=index) for index in range(2)]
    assert {tuple(sample) for sample in samples(shared)} == {tuple(sample) for sample in alone}


def test_generators_are_left_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draw(0).tolist()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    # Torch's loader draws one seed when an iteration begins; the shuffling draws nothing from the process.
    list(prepared(Augmented()))
    _, from_python, from_numpy, _ = expected
    assert [random.random(), np.random.rand()] == pytest.approx([from_python, from_numpy])
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()
    after_one_seed = torch.rand(())
    torch.manual_seed(1)
    list(prepared(Augmented()))
    assert torch.rand(()) == after_one_seed


def test_the_seed_travels_with_the_state() -> None:
    torch.manual_seed(77)
    first = prepared(Augmented(), seed=None)
    batches = iter(first)
    next(batches)
    saved = first.state_dict()
    rest = [batch.tolist() for batch in batches]
    torch.manual_seed(78)
    second = prepared(Augmented(), seed=None)
    second.load_state_dict(saved)
    assert epoch_of(second) == rest


def test_the_data_set_still_shows_itself() -> None:
    loader = prepared(Augmented())
    assert loader.dataset.note == "kept"
    assert len(loader.dataset) == 11
    assert loader.dataset[3][0] == 3
    loader.batch_sampler.even_batches = False
    assert loader.source.shard.even_batches is False
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = loader.dataset.nothing_of_the_kind
