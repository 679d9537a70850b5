"""Loaders as the engine wants them: one batch holds all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accel_ops import concatenate

__all__ = ("JoinedLoader", "MegatronLoader")


class JoinedLoader:
    """A prepared loader whose batches are joined, as many as a step has micro-batches.

    The last batch of an epoch holds those that are left. Everything else is that of the loader inside.

    Args:
        loader: gives micro-batches.
        count: micro-batches of a step.

    Attributes:
        micro_batches: how many that are.
    """

    def __init__(self, loader: Any, count: int) -> None:
        self.base_dataloader = loader
        self.micro_batches = count

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in self.base_dataloader:
            waiting.append(batch)
            if len(waiting) == self.micro_batches:
                yield concatenate(waiting)
                waiting = []
        if waiting:
            yield concatenate(waiting)

    def __len__(self) -> int:
        return -(-len(self.base_dataloader) // self.micro_batches)

    @property
    def total_batch_size(self) -> int:
        """Samples of a step, over all processes."""
        return int(self.base_dataloader.total_batch_size) * self.micro_batches

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)


class MegatronLoader:
    """Batches of one of Megatron's datasets, made when they are first asked for; endless.

    Args:
        source: makes the three iterators, of training, validation and test data.
        index: which of them this is.
        dataset_args: what was said of the data.
    """

    def __init__(self, source: Any, index: int, dataset_args: Mapping[str, Any]) -> None:
        self._source, self._index = source, index
        self.dataset_args = dataset_args
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self) -> Iterator[Any]:
        iterator = self._source()[self._index]
        return iter(()) if iterator is None else iter(iterator)
