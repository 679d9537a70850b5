"""What may be attached to a prepared loader: a transfer of its batches, and an observer of its epochs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

__all__ = ("DeviceTransfer", "LoaderObserver", "accompanied", "transferred")


class DeviceTransfer(Protocol):
    """Brings the batches of an epoch to the device: in threads, for example, or with a signal where a step ends.

    A backend sets `PreparedLoader.device_transfer` for devices that need more than a copy. The transfer sees batches
    alone, so a loader keeps account of its position in the loop's own time.

    Example:
        >>> def plain(pairs, ahead):
        ...     for batch, rest in pairs:
        ...         yield batch.to("cpu"), rest
    """

    def __call__(self, pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        """The pairs in their order, the tensors of their first halves on the device; the second halves unchanged.

        The next pair is read when the loop has finished with the batch before the last one that was given.

        Args:
            pairs: (batch, what travels with it). What it raises must be raised from here, after the pairs before.
            ahead: whether another thread may read it, any number of pairs ahead.
        """


class LoaderObserver(Protocol):
    """What sees the epochs and the batches of a loader, as the loop receives them."""

    def epoch_begins(self) -> None:
        """Called before an epoch begins: before its position is looked at, and before anything is drawn for it."""

    def batch_given(self, batch: Any) -> None:
        """Called with each batch, on its device, before the loop has it."""

    def epoch_ends(self) -> None:
        """Called when the loop has received the last batch and asked for another one, or when it was left."""


def transferred(
    items: Iterator[Any],
    transfer: DeviceTransfer,
    ahead: bool,
    batch_of: Callable[[Any], Any],
    replaced: Callable[[Any, Any], Any],
) -> Iterator[Any]:
    """Items that carry batches, with these on the device.

    Args:
        items: what a loader reads.
        transfer: brings batches to the device.
        ahead: whether another thread may read the items.
        batch_of: the batch of an item.
        replaced: the item with another batch.
    """
    pairs = ((batch_of(item), item) for item in items)
    for batch, item in transfer(pairs, ahead):
        yield replaced(item, batch)


def accompanied(
    steps: Generator[Any, None, int], between: Callable[[bool], None] | None, observer: LoaderObserver | None
) -> Generator[Any, None, int]:
    """The same batches, with a call before each is read, and each shown to an observer."""
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
