"""A data set without a length, for tests of loaders.

loader = prepare_data_loader(DataLoader(Stream(7), batch_size=2))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ("Stream",)


class Stream(IterableDataset[Any]):
    """Gives the same samples in every epoch, and has neither a length, nor a state, nor a way to divide itself.

    Args:
        samples: what it gives, in something that can be iterated again and again; for a number, the integers below it.

    Example:
        >>> list(Stream(3)), list(Stream("ab"))
        ([0, 1, 2], ['a', 'b'])
    """

    def __init__(self, samples: int | Iterable[Any]) -> None:
        self.samples = range(samples) if isinstance(samples, int) else samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)
