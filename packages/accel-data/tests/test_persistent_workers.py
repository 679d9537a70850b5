"""Persistent DataLoader workers: they read the data of the epoch that runs, and stay where they can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accel_data import MixtureDataset, prepare_data_loader
from accel_data.workers import keep_their_epoch
from accel_state.errors import Conflict

pytestmark = pytest.mark.usefixtures("fresh_state")

LENGTH = 8


class Indexed(Dataset[int]):
    """Samples that differ between epochs."""

    epoch: Any = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return 100 * int(self.epoch) + index


class Stream(IterableDataset[int]):
    """The same as a stream, divided between the workers."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(100 * self.epoch + first, 100 * self.epoch + LENGTH, step))


class Drawing(IterableDataset[int]):
    """A stream that goes on drawing from its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH, generator=self.generator).tolist())


class Shared(Indexed):
    """Workers see the epoch, as those of Hugging Face's streams do."""

    def __init__(self) -> None:
        self.epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)


class Ids(Dataset[int]):
    """Samples that are the same in every epoch."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def prepared(data: Any, persistent: bool, **options: Any) -> Any:
    plain: DataLoader[Any] = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=persistent)
    return prepare_data_loader(plain, restore_position=True, **options)


def epoch_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "indices": (Indexed, {}),
    "indices, seeded": (Indexed, {"seed_samples": True}),
    "stream": (Stream, {}),
    "stream, seeded": (Stream, {"seed_samples": True}),
    "stream, of two processes": (Stream, {"num_processes": 2, "process_index": 1}),
    "generator, of two processes": (Drawing, {"num_processes": 2, "process_index": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_epoch_is_that_of_workers_started_for_it(case: str) -> None:
    make, options = CASES[case]
    torch.manual_seed(1)
    loader, other = prepared(make(), True, **options), prepared(make(), False, **options)
    epochs, state = [], {}
    for _ in range(3):
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            if loader.iteration == 1 and len(batches) == 1:
                state = loader.state_dict()
        epochs.append(batches)
    assert epochs == [epoch_of(other) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again = prepared(make(), True, **options)
    again.load_state_dict(state)
    assert [epoch_of(again), epoch_of(again)] == [epochs[1][1:], epochs[2]]


@pytest.mark.parametrize(
    "make",
    [Ids, Shared, lambda: MixtureDataset({"a": range(9), "b": range(100, 109)}, {"a": 1, "b": 1})],
    ids=["without epochs", "shared epoch", "mixture"],
)
def test_workers_stay_where_they_see_the_epoch(make: Any) -> None:
    loader, other = prepared(make(), True), prepared(make(), False)
    workers = []
    for _ in range(2):
        assert epoch_of(loader) == epoch_of(other)
        workers.append([worker.pid for worker in loader.base_dataloader._iterator._workers])
    assert workers[0] == workers[1]
    assert not keep_their_epoch(loader.dataset)


def test_a_generator_of_which_workers_have_copies_is_refused() -> None:
    with pytest.raises(Conflict, match="have copies of the stream's generator"):
        prepared(Drawing(), True)
    prepared(Drawing(), False)
    prepared(Drawing(), True, seed_samples=True)
