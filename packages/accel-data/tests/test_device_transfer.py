"""A device transfer sees every batch, whatever travels with it, and the loader keeps account in the loop's own time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import prepare_data_loader, skip_first_batches
from accel_state.errors import DataError
from accel_testing.streams import Stream

pytestmark = pytest.mark.usefixtures("fresh_state")


class Recording:
    """Adds 100 to every batch, and remembers whether it may read ahead."""

    def __init__(self, depth: int = 0) -> None:
        self.depth, self.ahead, self.given = depth, [], 0  # type: ignore[var-annotated]

    def __call__(self, pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        self.ahead.append(ahead)
        held = []
        for pair in pairs:
            held.append(pair)
            while len(held) > self.depth:
                yield self._changed(held.pop(0))
        yield from map(self._changed, held)

    def _changed(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        self.given += 1
        return pair[0] + 100, pair[1]


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("dispatch", [False, True])
def test_every_batch_goes_through_the_transfer(dispatch: bool) -> None:
    loader = prepare_data_loader(
        DataLoader(range(7), batch_size=3), put_on_device=True, dispatch_batches=dispatch or None
    )
    transfer = Recording()
    loader.device_transfer = transfer  # type: ignore[attr-defined]
    assert numbers(loader) == [[100, 101, 102], [103, 104, 105], [106]]
    assert transfer.ahead == [False]


@pytest.mark.parametrize("depth", [0, 2, 9])
def test_the_end_is_known_with_the_last_batch_however_far_a_transfer_reads_ahead(depth: int) -> None:
    loader: Any = prepare_data_loader(DataLoader(range(7), batch_size=3))
    loader.device_transfer = Recording(depth)
    assert [(loader.end_of_dataloader, loader.progress.steps) for _ in loader] == [(False, 1), (False, 2), (True, 3)]


def test_the_padding_of_a_step_stays_with_its_batch() -> None:
    loader: Any = prepare_data_loader(DataLoader(Stream(7), batch_size=2), num_processes=2, process_index=1)
    loader.device_transfer = Recording(3)
    seen = [(batch.tolist(), loader.remainder) for batch in loader]
    assert seen[-1][1] == 3
    assert len(seen) == 2


@pytest.mark.parametrize(("workers", "ahead"), [(0, False), (1, True)])
def test_only_what_workers_read_may_be_read_ahead_in_threads(workers: int, ahead: bool) -> None:
    loader: Any = prepare_data_loader(DataLoader(torch.arange(4), batch_size=2, num_workers=workers))  # type: ignore[arg-type]
    transfer = Recording()
    loader.device_transfer = transfer
    assert numbers(loader) == [[100, 101], [102, 103]]
    assert transfer.ahead == [ahead]


def test_a_loader_that_skips_uses_the_transfer_too() -> None:
    loader: Any = prepare_data_loader(DataLoader(range(6), batch_size=2))
    loader.device_transfer = Recording()
    assert numbers(skip_first_batches(loader, 2)) == [[104, 105]]


def test_what_reading_raises_is_raised_in_the_loop() -> None:
    loader: Any = prepare_data_loader(DataLoader([1, 2], batch_size=1, sampler=[0, 1, 5]))
    loader.device_transfer = Recording()
    with pytest.raises(DataError, match="not in the data set"):
        numbers(loader)


def test_a_loop_that_stops_early_closes_the_transfer() -> None:
    loader: Any = prepare_data_loader(DataLoader(range(9), batch_size=1))
    closed = []

    def transfer(pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        try:
            yield from pairs
        finally:
            closed.append(True)

    loader.device_transfer = transfer
    reading = iter(loader)
    next(reading)
    reading.close()
    del reading
    assert closed == [True]
