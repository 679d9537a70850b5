"""`epoch_reader`: epochs whose next batch depends on what the loop did with the last one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accel_data import PreparedLoader, audit, prepare_data_loader, skip_first_batches
from accel_data.loader import NO_BATCH
from accel_state.errors import DataError


class UntilLearned:
    """Repeats each batch of a loader until the loop has learned it."""

    def __init__(self) -> None:
        self.trains, self.learned, self.read = True, False, 0

    def __call__(self, loader: PreparedLoader) -> Iterator[Any] | None:
        return self.batches(loader) if self.trains else None

    def batches(self, loader: PreparedLoader) -> Iterator[Any]:
        batches = loader.source.open()
        while (batch := loader.next_batch(batches)) is not NO_BATCH:
            self.read += 1
            self.learned = False
            while not self.learned:
                loader.progress.iteration.steps += 1
                yield batch


def repeating(data: Any = range(6), **options: Any) -> tuple[PreparedLoader, UntilLearned]:
    plain: DataLoader[Any] = DataLoader(data, batch_size=2)
    loader = prepare_data_loader(plain, num_processes=1, process_index=0, **options)
    assert isinstance(loader, PreparedLoader)
    loader.epoch_reader = reader = UntilLearned()
    return loader, reader


def test_the_loop_determines_the_next_batch_and_nothing_is_read_ahead(cpu_state: None) -> None:
    loader, reader = repeating()
    received, read = [], []
    for number, batch in enumerate(loader):
        received.append(batch.tolist())
        read.append(reader.read)
        reader.learned = number != 1
    assert received == [[0, 1], [2, 3], [2, 3], [4, 5]]
    assert read == [1, 2, 2, 3]
    assert loader.iteration == 1


def test_an_epoch_that_the_reader_leaves_to_the_loader_is_an_ordinary_one(cpu_state: None) -> None:
    loader, reader = repeating()
    reader.trains = False
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert reader.read == 0


def test_batches_of_a_reader_are_moved_to_the_device(cpu_state: None) -> None:
    loader, _ = repeating(device=torch.device("meta"), put_on_device=True)
    assert next(iter(loader)).is_meta


def test_the_gradient_state_follows_the_loader(cpu_state: None) -> None:
    loader, _ = repeating()
    batches = iter(loader)
    next(batches)
    assert loader.gradient_state.active_dataloader is loader
    del batches
    assert loader.gradient_state.active_dataloader is None


def test_work_between_batches_is_done_before_each_batch_is_read(cpu_state: None) -> None:
    loader, reader = repeating()
    calls: list[tuple[bool, int]] = []
    loader.between_batches = lambda first: calls.append((first, reader.read))
    for _ in loader:
        reader.learned = True
    assert calls == [(True, 0), (False, 1), (False, 2), (False, 3)]


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return [0, 1][index]


def test_errors_of_reading_name_the_loader(cpu_state: None) -> None:
    loader, reader = repeating(Broken())
    next(batches := iter(loader))
    reader.learned = True
    with pytest.raises(DataError, match="loader over Broken in epoch 0: cannot get the next batch"):
        next(batches)


def test_a_loader_that_skips_has_the_same_reader(cpu_state: None) -> None:
    loader, reader = repeating()
    skipping: Any = skip_first_batches(loader, 1)
    assert skipping.epoch_reader is reader
    received = []
    for batch in skipping:
        received.append(batch.tolist())
        reader.learned = True
    assert received == [[2, 3], [4, 5]]


def test_copies_by_pickle_and_audits_read_without_it(cpu_state: None) -> None:
    loader, reader = repeating()
    copied = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for batch in copied] == [[0, 1], [2, 3], [4, 5]]
    assert audit(loader).exact
    assert reader.read == 0
