"""Hooks of prepared loaders: which batches they receive, and which waits are recorded."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import prepare_data_loader
from accel_data.hooks import BatchPauses
from accel_state.watch.record import StatusRecord
from accel_state.watch.seconds import TimeAccount
from accel_testing.fresh import fresh

SLEEP = 0.02


class Slow(Dataset[torch.Tensor]):
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("a damaged sample")
        time.sleep(SLEEP)
        return torch.tensor([float(index)])


class SlowStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Slow()
        return (samples[index] for index in range(len(samples)))


class Hook:
    def __init__(self, waits: TimeAccount | None) -> None:
        self.waits = waits
        self.events: list[Any] = []

    def epoch_begins(self) -> None:
        self.events.append("begins")

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
    """A prepared loader and its hook, which receives the first batch after `due`; None: every batch."""

    def observe(data: Any, due: float | None, dispatched: bool = False) -> tuple[Any, Hook]:
        loader: Any = prepare_data_loader(DataLoader(data, batch_size=2), dispatch_batches=dispatched)
        account = None if due is None else TimeAccount(StatusRecord())
        if account is not None and due is not None:
            account.due = due
        loader.hook = hook = Hook(account)
        return loader, hook

    return observe


ALL = ["begins", [0.0, 1.0], [2.0, 3.0], [4.0, 5.0], "ends"]


@pytest.mark.parametrize(("data", "dispatched"), [(Slow(), False), (SlowStream(), False), (SlowStream(), True)])
@pytest.mark.parametrize(("due", "events"), [(None, ALL), (0.0, ALL), (math.inf, ["begins", "ends"])])
def test_a_hook_receives_the_batches_that_are_due(
    observed: Observed, data: Any, dispatched: bool, due: float | None, events: list[Any]
) -> None:
    loader, hook = observed(data, due, dispatched)
    for _ in range(2):
        assert len(list(loader)) == 3
    assert hook.events == events * 2


def test_waits_are_the_time_from_request_to_batch(observed: Observed) -> None:
    loader, hook = observed(Slow(), math.inf)
    assert hook.waits is not None
    for _ in loader:
        began, ended = hook.waits.marks
        assert began < ended
        before = hook.waits.waited
        time.sleep(5 * SLEEP)
        assert hook.waits.waited == before
    # All samples were read while the loop waited, and no wait is negative or counted twice.
    assert hook.waits.waited >= 6 * SLEEP


def test_a_failed_request_is_still_open_when_its_epoch_ends(observed: Observed) -> None:
    loader, hook = observed(Slow(fails_at=4), math.inf)
    assert hook.waits is not None
    with pytest.raises(ValueError, match="damaged"):
        list(loader)
    began, ended = hook.waits.marks
    assert began > ended
    assert hook.events == ["begins", "ends"]


def test_an_error_of_the_hook_ends_the_epoch(observed: Observed) -> None:
    loader, hook = observed(Slow(), 0.0)

    def refuse(batch: torch.Tensor) -> None:
        raise ValueError("refused")

    hook.batch_given = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="refused") as raised:
        list(loader)
    # The traceback still exists.
    assert raised.tb is not None
    assert not loader.gradient_state.in_dataloader
    assert hook.events == ["begins", "ends"]


@pytest.mark.parametrize("due", [None, math.inf])
def test_an_observed_loader_does_not_keep_a_batch_that_the_loop_dropped(observed: Observed, due: float | None) -> None:
    loader, _ = observed(Slow(), due)
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
    loader, _ = observed(Slow(), None)
    calls: list[bool] = []
    loader.between_batches, loader.pauses = calls.append, BatchPauses()
    for number, _ in enumerate(loader):
        loader.pauses.used = number == 1
    assert calls == [False]
    loader.pauses = None
    assert len(list(loader)) == 3
    assert calls == [False, True, False, False, False]
