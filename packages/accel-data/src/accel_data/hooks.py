"""Interfaces of objects attached to a prepared loader: a device transfer of batches, and a hook of epochs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Protocol

__all__ = ("BatchPauses", "DeviceTransfer", "LoaderHook", "accompanied", "with_hook")


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


class LoaderHook:
    """Follows the epochs and batches of a loader as the loop receives them; layers above subclass it."""

    def epoch_begins(self) -> None:
        """Called before an epoch begins, before its position is read and random numbers are drawn."""

    def batch_given(self, batch: Any) -> None:
        """Called with each batch, on its device, before the loop receives it."""

    def batch_requested(self) -> None:
        """Called when the loop requests a batch, before it is read."""

    def epoch_ends(self) -> None:
        """Called when the loop requests a batch after the last one, or when it ends early."""


class BatchPauses:
    """Whether `between_batches` of loaders has work to do, so that most batches are given without a call.

    Attributes:
        used: whether it is called now.
    """

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False


def accompanied(
    batches: Iterator[Any], between: Callable[[bool], None], pauses: BatchPauses | None
) -> Generator[Any, None, None]:
    """Yield batches, and call `between` before each is read, with True before the first.

    Args:
        batches: the batches of an epoch.
        between: called between batches, with whether the epoch begins.
        pauses: whether anything waits for these calls; without it, `between` is always called.
    """
    end, first = object(), True
    while True:
        if pauses is None or pauses.used:
            between(first)
        first = False
        if (batch := next(batches, end)) is end:
            return
        yield batch
        # Its memory must be free before the next batch is read.
        del batch


def with_hook(batches: Generator[Any, None, None], hook: LoaderHook) -> Generator[Any, None, None]:
    """The batches of an epoch, with calls of a hook."""
    hook.epoch_begins()
    requested, passed = hook.batch_requested, hook.batch_given
    # The traceback of an error that the hook raises must not keep the epoch open.
    with closing(batches):
        try:
            requested()
            for batch in batches:
                passed(batch)
                yield batch
                # Its memory must be free before the next batch is copied to the device.
                del batch
                requested()
        finally:
            hook.epoch_ends()
