"""Interfaces of objects attached to a prepared loader: a device transfer of batches, and an observer of epochs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

__all__ = ("DeviceTransfer", "LoaderObserver", "accompanied", "transferred")


class DeviceTransfer(Protocol):
    """Copies the batches of an epoch to the device, for example in threads, or with a signal at the end of a step.

    A backend sets `PreparedLoader.device_transfer` for devices that need more than a copy. The transfer receives only
    batches; the loader itself tracks the position.

    Example:
        >>> def plain(pairs, ahead):
        ...     for batch, rest in pairs:
        ...         yield batch.to("cpu"), rest
    """

    def __call__(self, pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        """Yield the pairs in order, with the tensors of the first element on the device.

        The next pair is read when the loop has finished with the batch before the last yielded one.

        Args:
            pairs: (batch, attached value). Its errors must be raised from here, after the earlier pairs.
            ahead: whether another thread may read it, any number of pairs ahead.
        """


class LoaderObserver(Protocol):
    """Observes the epochs and batches of a loader as the loop receives them."""

    def epoch_begins(self) -> None:
        """Called before an epoch begins, before its position is read and random numbers are drawn."""

    def batch_given(self, batch: Any) -> None:
        """Called with each batch, on its device, before the loop receives it."""

    def epoch_ends(self) -> None:
        """Called when the loop requests a batch after the last one, or when it ends early."""


def transferred(
    items: Iterator[Any],
    transfer: DeviceTransfer,
    ahead: bool,
    batch_of: Callable[[Any], Any],
    replaced: Callable[[Any, Any], Any],
) -> Iterator[Any]:
    """Items with their batches copied to the device.

    Args:
        items: the items that a loader reads.
        transfer: copies batches to the device.
        ahead: whether another thread may read the items.
        batch_of: returns the batch of an item.
        replaced: returns the item with another batch.
    """
    pairs = ((batch_of(item), item) for item in items)
    for batch, item in transfer(pairs, ahead):
        yield replaced(item, batch)


def accompanied(
    steps: Generator[Any, None, int], between: Callable[[bool], None] | None, observer: LoaderObserver | None
) -> Generator[Any, None, int]:
    """The same batches, with a call before each is read, and an observer that receives each."""
    try:
        if between is not None:
            between(True)
        while True:
            try:
                batch = next(steps)
            except StopIteration as end:
                given: int = end.value
                return given
            if observer is not None:
                observer.batch_given(batch)
            yield batch
            if between is not None:
                between(False)
    finally:
        if observer is not None:
            observer.epoch_ends()
