"""Loaders that keep one iterator over all epochs, so that their DataLoader workers stay.

timm's `MultiEpochsDataLoader` and ultralytics' `InfiniteDataLoader` wrap their batch sampler in one that never ends,
open one iterator when they are created, and take an epoch of batches from it at a time. A copy of such a loader would
go on with the iterator over the data of all processes. Here the copy gets an iterator that reads one epoch at a time,
through a plain loader with persistent workers; what the class does with the batches stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ("EpochIterator", "keeps_iterator", "reading_epochs", "restart_kept_iterators")


class EpochIterator:
    """Yields the batches of the epoch that was begun last.

    Args:
        loader: a plain loader over the samples of one epoch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(())

    def restart(self, begin: Callable[[DataLoader[Any]], Iterator[Any]]) -> None:
        """Begin an epoch."""
        self._batches = begin(self.loader)

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


def _kept(loader: DataLoader[Any]) -> list[str]:
    """The attributes of a loader that are iterators over its batches, apart from torch's own."""
    kinds = (_BaseDataLoaderIter, EpochIterator)
    return [name for name, value in vars(loader).items() if name != "_iterator" and isinstance(value, kinds)]


def keeps_iterator(loader: DataLoader[Any]) -> bool:
    """Whether a loader keeps one iterator, and has a batch sampler around that of an epoch."""
    return hasattr(loader.batch_sampler, "sampler") and bool(_kept(loader))


def reading_epochs(loader: DataLoader[Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes to a copy of such a loader, which reads one epoch at a time.

    Args:
        loader: the loader.
        changes: other attributes of the copy, among them its batch sampler of an epoch.
    """
    repeating: Any = copy.copy(loader.batch_sampler)
    repeating.sampler = changes.get("batch_sampler", repeating.sampler)
    plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
    names = _kept(loader)
    own = {name: value for name, value in vars(loader).items() if name not in names}
    vars(plain).update(own | dict(changes), batch_sampler=repeating.sampler, _iterator=None)
    vars(plain).update(persistent_workers=loader.num_workers > 0)
    return {**changes, "batch_sampler": repeating, **{name: EpochIterator(plain) for name in names}}


def restart_kept_iterators(loader: DataLoader[Any], begin: Callable[[DataLoader[Any]], Iterator[Any]]) -> None:
    """Begin an epoch of the iterators that a loader keeps.

    Args:
        loader: the loader, whose iteration then takes its batches from them.
        begin: begins to read a plain loader.
    """
    for name in _kept(loader):
        vars(loader)[name].restart(begin)
