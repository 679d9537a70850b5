"""How batches reach a device that wants more than a copy: one that is fed by threads, or told where a step ends.

A backend whose devices are fed in their own way sets `PreparedLoader.feed`. It sees batches alone, whatever travels
with them, so that a loader keeps account of where it stands in the loop's own time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

__all__ = ("Feed", "fed")


class Feed(Protocol):
    """Brings the batches of an epoch to the device.

    Example:
        >>> def plain(pairs, ahead):
        ...     for batch, rest in pairs:
        ...         yield batch.to("cpu"), rest
    """

    def __call__(self, pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        """The pairs in their order, the tensors of their first halves on the device; the second halves as they are.

        The next pair is asked for when the loop is done with the batch before the last one that was given.

        Args:
            pairs: (batch, what travels with it). What it raises must be raised from here, after the pairs before.
            ahead: whether it may be read in another thread, any number of pairs ahead of what was asked for.
        """


def fed(
    items: Iterator[Any],
    feed: Feed,
    ahead: bool,
    batch_of: Callable[[Any], Any],
    replaced: Callable[[Any, Any], Any],
) -> Iterator[Any]:
    """Items that carry batches, with these on the device.

    Args:
        items: what a loader reads.
        feed: brings batches to the device.
        ahead: whether items may be read in another thread.
        batch_of: the batch of an item.
        replaced: the item with another batch.
    """
    pairs = ((batch_of(item), item) for item in items)
    for batch, item in feed(pairs, ahead):
        yield replaced(item, batch)
