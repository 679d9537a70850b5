"""Loaders that keep one iterator over all epochs are sharded as others are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import prepare_data_loader
from accel_state import PartialState
from accel_testing.processes import Processes

pytestmark = pytest.mark.usefixtures("fresh_state")


class Repeat:
    """A batch sampler that never ends."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader[Any]):
    """Keeps its iterator, and adds 100 to each batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr, arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator) + 100


def epochs(cases: list[tuple[int, int, bool]]) -> list[tuple[list[list[int]], int]]:
    """The real samples of three epochs, the last after a break; and the length."""
    rank = PartialState(cpu=True).process_index
    found = []
    for length, workers, shuffle in cases:
        plain = Endless(torch.arange(length), batch_size=2, num_workers=workers, shuffle=shuffle)
        loader: Any = prepare_data_loader(plain, put_on_device=True, use_seedable_sampler=True, data_seed=1)
        assert isinstance(loader, Endless)
        result = []
        for epoch in range(3):
            if epoch == 2:
                next(iter(loader))
                loader.set_epoch(epoch)
            real: list[int] = []
            for batch in loader:
                padding = loader.progress.padding
                real += (batch - 100).tolist() if padding is None else (batch - 100)[: padding.of(rank)].tolist()
            result.append(real)
        found.append((result, len(loader)))
    return found


CASES = [*product((12, 48), (0,), (False, True)), (13, 1, True)]


@pytest.mark.parametrize("world", ["one", "two", "three"])
def test_every_sample_once_an_epoch(world: str, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    for case, *found in zip(CASES, *processes.run(epochs, CASES, timeout=250), strict=True):
        length, _, shuffle = case
        for epoch in range(3):
            assert sorted(chain.from_iterable(ranks[epoch] for ranks, _ in found)) == list(range(length)), case
        assert {steps for _, steps in found} == {-(-length // (2 * len(found)))}, case
        assert (found[0][0][0] != found[0][0][1]) == shuffle, case


def test_such_a_loader_resumes_in_the_middle_of_an_epoch(cpu_state: None) -> None:
    def make() -> Any:
        plain = Endless(torch.arange(12), batch_size=2, shuffle=True)
        return prepare_data_loader(plain, use_seedable_sampler=True, data_seed=1, restore_position=True)

    loader, rest, state = make(), [], {}
    for number, batch in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
        if number > 1:
            rest.append(batch.tolist())
    again = make()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]
