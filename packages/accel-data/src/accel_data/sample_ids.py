"""Sample ids in place of the samples themselves, to inspect the order of an epoch without training on it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

__all__ = ("ContentHashIds", "IndexIds", "PositionIds", "as_list")


class IndexIds(Dataset[int]):
    """A data set whose samples are their indices.

    Args:
        dataset: the data set with these indices.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return len(self.dataset)


class _StreamIds(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on if the stream has `set_epoch`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)


class PositionIds(_StreamIds):
    """A stream whose samples are "DataLoader worker:position".

    Args:
        dataset: the stream; it is read.
    """

    def __iter__(self) -> Iterator[str]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        return (f"{number}:{position}" for position, _ in enumerate(self.dataset))


class ContentHashIds(_StreamIds):
    """A stream whose samples are digests of their contents.

    Args:
        dataset: the stream; it is read.
    """

    def __iter__(self) -> Iterator[str]:
        return (hashlib.blake2b(pickle.dumps(sample), digest_size=16).hexdigest() for sample in self.dataset)


def as_list(samples: Any) -> Any:
    """A collate function that returns its batch unchanged."""
    return samples
