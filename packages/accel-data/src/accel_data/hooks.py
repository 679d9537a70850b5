"""Interfaces of objects attached to a prepared loader: a device transfer of batches, and a hook of epochs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from accel_state.watch.seconds import TimeAccount

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


class LoaderHook(Protocol):
    """Follows the epochs and batches of a loader as the loop receives them; implemented in layers above.

    Attributes:
        waits: the account in which the loader records how long its loop waits for batches, so that no function is
            called for each batch: `batch_given` receives the first batch after `waits.due`. None calls it with every
            batch.
    """

    waits: TimeAccount | None

    def epoch_begins(self) -> None:
        """Called before an epoch begins, before its position is read and random numbers are drawn."""

    def batch_given(self, batch: Any) -> None:
        """Called with each batch that is due, on its device, before the loop receives it."""

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
    """The same batches, with a call before each is read: with True before the first."""
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
    waits = hook.waits
    # The traceback of an error that the hook raises must not keep the epoch open.
    with closing(batches):
        try:
            if waits is None:
                for batch in batches:
                    hook.batch_given(batch)
                    yield batch
                    del batch
                return
            marks = waits.marks
            marks[0] = monotonic()
            for batch in batches:
                marks[1] = now = monotonic()
                waits.waited += now - marks[0]
                if now > waits.due:
                    hook.batch_given(batch)
                yield batch
                # Its memory must be free before the next batch is copied to the device.
                del batch
                marks[0] = monotonic()
        finally:
            hook.epoch_ends()
