"""Trains a small model for three epochs on a loader of the kind that its argument names, for `accel check-resume`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from accel_data import MixtureDataset
from accel_torch import Accelerator, DataLoaderConfiguration, set_seed

SAMPLES, BATCH = 42, 4


class Rows(Dataset[Any]):
    """Rows with a random part, which is the same after a resume where samples are seeded."""

    def __init__(self, augmented: bool = False, first: int = 0) -> None:
        self._augmented, self._first = augmented, first

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.randn(4, generator=torch.Generator().manual_seed(self._first + index))
        return row + random.random() * torch.rand(()) if self._augmented else row


class Stream(IterableDataset[Any]):
    """The rows in another order in each epoch, with a position of its own."""

    def __init__(self, first: int = 0) -> None:
        self._rows, self._epoch, self._read = Rows(first=first), 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        while self._read < SAMPLES:
            self._read += 1
            yield self._rows[order[self._read - 1]]
        self._read = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "read": self._read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._read = state["epoch"], state["read"]


def batches() -> DataLoader[Any]:
    """A loader with a batch sampler of the script's."""
    rows = Rows()
    return DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), BATCH, drop_last=False))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), BATCH, shuffle=True, **options)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sequential": (lambda: DataLoader(Rows(), BATCH), {}),
    "shuffled": (shuffled, {}),
    "dropped": (lambda: shuffled(drop_last=True), {}),
    "seedable": (shuffled, {"use_seedable_sampler": True, "data_seed": 5}),
    "global": (shuffled, {"order": "global", "data_seed": 5}),
    "split": (shuffled, {"split_batches": True}),
    "batches": (batches, {}),
    "workers": (lambda: shuffled(num_workers=1), {}),
    "augmented": (lambda: DataLoader(Rows(True), BATCH, shuffle=True), {"seed_samples": True}),
    "dispatched": (shuffled, {"dispatch_batches": True}),
    "stateful": (shuffled, {"use_stateful_dataloader": True}),
    "mixture": (lambda: DataLoader(MixtureDataset({"a": Rows(), "b": Rows(first=99)}, {"a": 2, "b": 1}), BATCH), {}),
    "stream": (lambda: DataLoader(Stream(), BATCH), {"dispatch_batches": False}),
    "stream_dispatched": (lambda: DataLoader(Stream(), BATCH), {"dispatch_batches": True}),
    "stream_stateful": (lambda: DataLoader(Stream(), BATCH), {"use_stateful_dataloader": True}),
}
"""By name, what makes the loader, and fields of the `DataLoaderConfiguration`."""


def main(kind: str) -> None:
    set_seed(3)
    made, options = KINDS[kind]
    restores: dict[str, Any] = {} if options.get("use_stateful_dataloader") else {"restore_position": True}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options, **restores))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, made())
    for _ in range(3):
        for rows in loader:
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
