"""Streams that are divided by rank already, and would lose samples if the main process read for all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader
from accel_state import PartialState
from accel_state.errors import Conflict
from accel_testing.processes import Processes


class Divided(IterableDataset[int]):
    """Yields every other number, from its rank on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 12, 2))


class Whole(IterableDataset[int]):
    """Counts what was read, which only the main process does."""

    def __init__(self) -> None:
        self.length, self.read = 12, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.read += 1
            yield number


def split_by_node(source: Any) -> Any:
    """As in WebDataset."""
    return source


class Pipeline(Divided):
    """Has its stages in a list, as WebDataset does."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.pipeline = [list, partial(split_by_node)]


def dispatched(divided: bool) -> tuple[list[int], list[str]]:
    rank = PartialState(cpu=True).process_index
    loader: Any = prepare_data_loader(DataLoader(Divided(rank) if divided else Whole(), 2), dispatch_batches=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = [sample for _ in range(2) for batch in loader for sample in batch.tolist()]
    return samples, [str(warning.message) for warning in caught]


def test_a_stream_that_differs_between_processes_is_a_warning(two: Processes) -> None:
    (_, (text,)), (_, others) = two.run(dispatched, True)
    assert "rank=0 there and rank=1 on process 1" in text
    assert "sharding='already'" in text
    assert others == []


def test_a_whole_stream_is_read_without_a_warning(two: Processes) -> None:
    (first, texts), (second, others) = two.run(dispatched, False)
    assert sorted(first + second) == sorted([*range(12)] * 2)
    assert texts == others == []


def declared() -> tuple[str, list[int]]:
    rank = PartialState(cpu=True).process_index
    with pytest.raises(Conflict) as caught:
        prepare_data_loader(DataLoader(Pipeline(rank), 2), dispatch_batches=True)
    loader: Any = prepare_data_loader(DataLoader(Pipeline(rank), 2), put_on_device=True)
    return str(caught.value), [sample for batch in loader for sample in batch.tolist()]


def test_a_declared_division_is_read_as_it_is_and_not_dispatched(two: Processes) -> None:
    for rank, (text, samples) in enumerate(two.run(declared)):
        assert "Cannot dispatch the stream Pipeline" in text
        assert samples == list(range(rank, 12, 2))
