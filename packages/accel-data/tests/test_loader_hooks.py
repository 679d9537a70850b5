"""Hooks of prepared loaders: in which order they are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import prepare_data_loader
from accel_data.hooks import BatchPauses, LoaderHook
from accel_testing.fresh import fresh


class Samples(Dataset[torch.Tensor]):
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("a damaged sample")
        return torch.tensor([float(index)])


class SampleStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Samples()
        return (samples[index] for index in range(len(samples)))


class Hook(LoaderHook):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def epoch_begins(self) -> None:
        self.events.append("begins")

    def batch_requested(self) -> None:
        self.events.append("requested")

    def batch_given(self, batch: torch.Tensor) -> None:
        self.events.append(batch.flatten().tolist())

    def epoch_ends(self) -> None:
        self.events.append("ends")


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with fresh():
        yield


Observed = Callable[..., tuple[Any, Hook]]


@pytest.fixture
def observed() -> Observed:
    """A prepared loader and its hook."""

    def observe(data: Any, dispatched: bool = False) -> tuple[Any, Hook]:
        loader: Any = prepare_data_loader(DataLoader(data, batch_size=2), dispatch_batches=dispatched)
        loader.hook = hook = Hook()
        return loader, hook

    return observe


ALL = ["begins", "requested", [0.0, 1.0], "requested", [2.0, 3.0], "requested", [4.0, 5.0], "requested", "ends"]


@pytest.mark.parametrize(("data", "dispatched"), [(Samples(), False), (SampleStream(), False), (SampleStream(), True)])
def test_a_hook_follows_the_epochs(observed: Observed, data: Any, dispatched: bool) -> None:
    loader, hook = observed(data, dispatched)
    for _ in range(2):
        assert len(list(loader)) == 3
    assert hook.events == ALL * 2


def test_a_failed_request_is_still_open_when_its_epoch_ends(observed: Observed) -> None:
    loader, hook = observed(Samples(fails_at=4))
    with pytest.raises(ValueError, match="damaged"):
        list(loader)
    assert hook.events[-2:] == ["requested", "ends"]


def test_an_error_of_the_hook_ends_the_epoch(observed: Observed) -> None:
    loader, hook = observed(Samples())

    def refuse(batch: torch.Tensor) -> None:
        raise ValueError("refused")

    hook.batch_given = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="refused") as raised:
        list(loader)
    # The traceback still exists.
    assert raised.tb is not None
    assert not loader.gradient_state.in_dataloader
    assert hook.events == ["begins", "requested", "ends"]


def test_an_observed_loader_does_not_keep_a_batch_that_the_loop_dropped(observed: Observed) -> None:
    loader, _ = observed(Samples())
    given: list[weakref.ref[Any]] = []
    read: list[bool] = []

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        read.append(bool(given) and given[-1]() is not None)
        return torch.stack(samples)

    loader.base_dataloader.collate_fn = collate
    batches = iter(loader)
    batch = next(batches)
    given.append(weakref.ref(batch))
    del batch
    next(batches)
    # While the third batch is read, the first one no longer exists.
    assert read == [False, False, False]


def test_pauses_turn_the_calls_between_batches_off(observed: Observed) -> None:
    loader, _ = observed(Samples())
    calls: list[bool] = []
    loader.between_batches, loader.pauses = calls.append, BatchPauses()
    for number, _ in enumerate(loader):
        loader.pauses.used = number == 1
    assert calls == [False]
    loader.pauses = None
    assert len(list(loader)) == 3
    assert calls == [False, True, False, False, False]
