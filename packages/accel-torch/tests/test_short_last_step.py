"""Metrics of a short last step count each sample once, whatever told how many samples come."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


class Stream(IterableDataset[Any]):
    """Numbers; its length is unknown."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.length, dtype=torch.float32))


class SizedStream(Stream):
    """Numbers, with their count."""

    def __len__(self) -> int:
        return self.length


def rows_of_repeated_loss(kind: Any, length: int, dispatch: bool | None) -> tuple[list[int], float, list[float]]:
    """Rows of each step, their mean, and the samples, for a loss repeated for a batch of 8 as the Trainer does."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    rows, losses, samples = [], [], []
    for batch in accelerator.prepare(DataLoader(kind(length), batch_size=8)):
        gathered = accelerator.gather_for_metrics(batch.mean().repeat(8))
        rows.append(len(gathered))
        losses.append(gathered)
        samples += accelerator.gather_for_metrics(batch).tolist()
    return rows, float(torch.cat(losses).mean()), samples


@pytest.mark.parametrize(("kind", "dispatch"), list(product((Stream, SizedStream), (None, True, False))))
def test_repeated_loss_of_short_last_step_on_one_process(kind: Any, dispatch: bool | None) -> None:
    rows, mean, samples = rows_of_repeated_loss(kind, 66, dispatch)
    assert rows == [8] * 8 + [2]
    assert mean == pytest.approx(32.5)
    assert samples == list(range(66))


def test_repeated_loss_of_complete_last_step_on_one_process() -> None:
    assert rows_of_repeated_loss(Stream, 64, None)[0] == [8] * 8


def on_two(cases: list[tuple[Any, int, bool | None]]) -> list[tuple[list[int], float, list[float]]]:
    return [rows_of_repeated_loss(*case) for case in cases]


def test_repeated_loss_of_short_last_step_on_two_processes(two: Processes) -> None:
    cases = list(product((Stream, SizedStream), (66, 67, 72, 80), (True,)))
    for results in two.run(on_two, cases):
        for (kind, length, _), (rows, mean, samples) in zip(cases, results, strict=True):
            case = (kind.__name__, length)
            assert sum(rows) == length, case
            assert sorted(samples) == list(range(length)), case
            # Each process's mean counts as often as it has samples; an odd count needs a filler, which is in its mean.
            if length % 2 == 0:
                assert mean == pytest.approx((length - 1) / 2), case


def sizes_with_even_batches(loader: Any, set_even: bool) -> list[int]:
    if set_even:
        loader.batch_sampler.even_batches = True
    return [len(batch) for (batch,) in loader]


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_one_process_is_never_padded(split: bool, custom: bool) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split))
    data = TensorDataset(torch.arange(22))
    sampler = Wider(range(22), 4, False) if custom else BatchSampler(range(22), 4, False)
    loader = accelerator.prepare(DataLoader(data, batch_sampler=sampler))
    assert sizes_with_even_batches(loader, set_even=True) == [4, 4, 4, 4, 4, 2]
    assert len(loader) == 6


class Wider(BatchSampler):
    """A batch sampler of the script's own."""


def test_join_with_even_batches_pads_nothing_on_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(torch.arange(22)), batch_size=4))
    with accelerator.join_uneven_inputs([model], even_batches=True):
        assert sizes_with_even_batches(loader, set_even=False) == [4, 4, 4, 4, 4, 2]
