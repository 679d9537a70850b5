"""Batches of pinned memory that are copied without waiting, and computed with at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import prepare_data_loader
from accel_testing.plugin import on_devices

SAMPLES, WIDTH = 12, 2**16


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((WIDTH,), float(index)), "deep": [torch.tensor(index)]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Rows()[index] for index in range(SAMPLES))


def delay(device: torch.device) -> None:
    """Keep the device busy, so that copies are queued behind it."""
    side = 4096 if device.type == "cuda" else 64
    product = torch.full((side, side), 1.0 / side, device=device)
    for _ in range(4):
        product = product @ product


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["indices", "stream"])
@on_devices("cpu", differs="batches are copied from pinned memory behind kernels, and their memory is used again")
def test_batches_are_computed_with_at_once(device: torch.device, kind: str, dispatch: bool, workers: int) -> None:
    data: Any = Rows() if kind == "indices" else Stream()
    pins = device.type == "cuda"
    plain = DataLoader(data, batch_size=2, num_workers=workers, pin_memory=pins)
    loader: Any = prepare_data_loader(
        plain, device=device, put_on_device=True, non_blocking=True, dispatch_batches=dispatch
    )
    means, indices = [], []
    for batch in loader:
        delay(device)
        assert batch["x"].device == device
        # Left on the device, so that nothing waits before the last batch.
        means.append(batch["x"].mean(dim=1))
        indices.append(batch["deep"][0].clone())
    assert torch.cat(means).tolist() == [float(index) for index in range(SAMPLES)]
    assert torch.cat(indices).tolist() == list(range(SAMPLES))
    loader.device = None
    assert {batch["x"].is_pinned() for batch in loader} == {pins}
