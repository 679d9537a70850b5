"""DataLoader workers: when an epoch needs new ones, what torch draws for them, and where their errors are raised.

torch looks for workers that died in a handler of SIGCHLD, and raises from there, wherever the main thread is: also in
the middle of a collective or of a save, in which the other processes would then wait for this one. Here the error waits
for the next read of a loader.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from accel_data.seeding import SeededSamples
from accel_data.streams import IterableDatasetShard

__all__ = ("WORKER_ERRORS", "keep_their_epoch", "opened_with_workers")

WORKER_ERRORS: Final = ("DataLoader worker", "DataLoader timed out")
"""How torch's message begins when a DataLoader worker died or does not answer."""


class _DeferringHandler:
    """A handler of SIGCHLD that calls torch's, and keeps the error while the main thread does not read."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._error: RuntimeError | None = None
        self._reads = 0

    def install(self) -> bool:
        """Replace torch's handler, once for all loaders; returns whether errors are deferred."""
        if self._handler is None and sys.platform != "win32" and _is_main_thread():
            present = signal.getsignal(signal.SIGCHLD)
            if callable(present):
                self._handler = present
                signal.signal(signal.SIGCHLD, self)
        return self._handler is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        assert self._handler is not None
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            # A handler of the program, which torch's calls, may raise too.
            if self._reads or not str(error).startswith(WORKER_ERRORS):
                # The error may leave the read before it counts itself out.
                self._reads = 0
                raise
            self._error = error

    def read(self, batches: Iterator[Any]) -> Any:
        """The next batch; raises StopIteration at the end."""
        counts = _is_main_thread()
        self._reads += counts
        try:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return next(batches)
        except RuntimeError:
            # The workers of another thread's loader are reported by torch itself.
            self._error = None
            raise
        finally:
            self._reads = max(self._reads - counts, 0)


_handler: Final = _DeferringHandler()


def opened_with_workers(loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
    """Begin to read through a loader, drawing from the process's generator what a run that was not interrupted draws.

    Persistent DataLoader workers start in the first epoch of such a run, and torch draws a seed for them there. Where
    a run that was resumed starts them later, their seed is drawn from a generator of its own. Workers that would go on
    with the data of an earlier epoch are replaced in every epoch, with a seed drawn each time.

    Args:
        loader: has workers.
        epoch: number of the epoch.
    """
    persist = loader.persistent_workers
    if persist and keep_their_epoch(loader.dataset):
        persist, loader._iterator = False, None
    if epoch == 0 or not persist or loader.generator is not None or loader._iterator is not None:
        return _raised_where_read(iter(loader))
    loader.generator = torch.Generator().manual_seed(torch.initial_seed() + epoch)
    try:
        return _raised_where_read(iter(loader))
    finally:
        loader.generator = None


def keep_their_epoch(dataset: Any) -> bool:
    """Whether DataLoader workers that run stay in the epoch of their start, because each has a copy of the data set.

    A data set may share its epoch with them, as those of Hugging Face do, in a tensor or a value of `multiprocessing`.

    Args:
        dataset: of the loader.
    """
    while isinstance(dataset, (IterableDatasetShard, SeededSamples)):
        inner = dataset.dataset
        if isinstance(dataset, IterableDatasetShard) and isinstance(getattr(inner, "generator", None), torch.Generator):
            # The shard seeds it with the epoch.
            return True
        dataset = inner
    # A mixture finds its samples in the process that has the workers.
    if not hasattr(dataset, "set_epoch") or hasattr(dataset, "resolved"):
        return False
    return not any(map(_is_shared, getattr(dataset, "__dict__", {}).values()))


def _is_shared(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.is_shared())  # type: ignore[no-untyped-call]
    return type(value).__module__ == "multiprocessing.sharedctypes"


def _raised_where_read(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of torch's iterator, whose workers were started by now."""
    if not _handler.install():
        return batches
    return _reading(batches)


def _reading(batches: Iterator[Any]) -> Iterator[Any]:
    # No variable keeps the batch while the loop's body runs.
    try:
        while True:
            yield _handler.read(batches)
    except StopIteration:
        return


def _is_main_thread() -> bool:
    # Python runs handlers of signals only there.
    return threading.current_thread() is threading.main_thread()
