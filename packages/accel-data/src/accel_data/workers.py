"""DataLoader workers: when an epoch needs new ones, which seeds torch draws for them, where their errors are raised.

torch detects dead workers in a handler of SIGCHLD and raises the error there, at any point of the main thread. During a
collective or a save, the other processes would then wait for this one. Here the error is deferred to the next read of a
loader.
"""

from __future__ import annotations

import multiprocessing.process
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import torch
from torch.utils.data import DataLoader

from accel_data.seeding import SeededSamples
from accel_data.streams import IterableDatasetShard

__all__ = ("explain", "keep_their_epoch", "opened_with_workers")

_WORKER_ERRORS: Final = ("DataLoader worker", "DataLoader timed out")
"""Beginnings of torch's messages about a DataLoader worker that died or does not answer."""

_END_TIMEOUT_S: Final = 5.0
"""Seconds to wait for the end of a worker whose connection is broken; torch looks at its workers as often."""


def explain(error: Exception, loader: DataLoader[Any]) -> tuple[str, str, str] | None:
    """What failed, why, and what to do, for an error of reading through a loader; None if it says so itself."""
    if isinstance(error, IndexError):
        return (
            "cannot get the next batch.",
            f"An index of the sampler is not in the data set: {error}",
            "Check that the data set's __len__ and the sampler agree with the indices that __getitem__ accepts.",
        )
    if not loader.num_workers or not _is_of_a_worker(error):
        return None
    if _lacks_main_guard(loader):
        return (
            "cannot start its DataLoader workers.",
            "They import the script again, and each would run all of it.",
            "Put the main part of the script under `if __name__ == '__main__':`, or give the DataLoader "
            "multiprocessing_context='fork'.",
        )
    return (
        "cannot get the next batch.",
        f"A DataLoader worker died or did not answer: {error}",
        "Look for the cause (memory, a crash in __getitem__), or try num_workers=0.",
    )


def _is_of_a_worker(error: BaseException) -> bool:
    """Whether an error of reading means that a DataLoader worker died or does not answer."""
    if isinstance(error, RuntimeError):
        return str(error).startswith(_WORKER_ERRORS)
    return isinstance(error, (EOFError, OSError)) and _is_of_a_connection(error)


def _is_of_a_connection(error: BaseException) -> bool:
    """Whether the error was raised where processes exchange objects; an error inside a worker is raised elsewhere."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("multiprocessing."):
            return True
        trace = trace.tb_next
    return False


def _lacks_main_guard(loader: DataLoader[Any]) -> bool:
    """Whether the workers of a loader import the script again, and the script would run in each of them."""
    context: Any = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() == "fork":
        return False
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return path is not None and "__main__" not in Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _end_in_an_unguarded_worker() -> None:
    """End a worker that imports the script again and reads a loader there; its parent says what is missing."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise SystemExit(1)


class _DeferringHandler:
    """A SIGCHLD handler that calls torch's handler and defers its error until the main thread reads."""

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
            # torch's handler calls the program's handler, which may also raise.
            if self._reads or not _is_of_a_worker(error):
                # The error may be raised before `read` can decrement the counter.
                self._reads = 0
                raise
            self._error = error

    def _raise_deferred(self) -> NoReturn:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            # The error would keep this frame alive, and the frame the error.
            del error

    def read(self, batches: Iterator[Any]) -> Any:
        """The next batch; raises StopIteration at the end."""
        counts = _is_main_thread()
        self._reads += counts
        try:
            if self._error is not None:
                self._raise_deferred()
            return next(batches)
        except RuntimeError:
            # Outside the main thread torch reports dead workers itself.
            self._error = None
            raise
        except (EOFError, OSError) as error:
            if counts and _is_of_a_connection(error):
                # The connection breaks before torch can see that the worker has ended. This handler ends the wait.
                time.sleep(_END_TIMEOUT_S)
            raise
        finally:
            self._reads = max(self._reads - counts, 0)


_handler: Final = _DeferringHandler()


def opened_with_workers(loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
    """Begin to iterate a loader, with the same draws from the process's generator as in an uninterrupted run.

    In an uninterrupted run persistent DataLoader workers start in the first epoch, and torch draws a seed for them
    there. If a resumed run starts them later, their seed is drawn from a separate generator. Workers that would
    continue with the data of an earlier epoch are replaced in every epoch, with a new seed each time.

    Args:
        loader: a loader with workers.
        epoch: number of the epoch.
    """
    _end_in_an_unguarded_worker()
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
    """Whether running DataLoader workers miss later `set_epoch` calls, because each has a copy of the data set.

    A data set may share its epoch with them in a shared tensor or `multiprocessing` value, as Hugging Face datasets do.

    Args:
        dataset: the loader's data set.
    """
    while isinstance(dataset, (IterableDatasetShard, SeededSamples)):
        inner = dataset.dataset
        if isinstance(dataset, IterableDatasetShard) and isinstance(getattr(inner, "generator", None), torch.Generator):
            # The shard seeds this generator with the epoch.
            return True
        dataset = inner
    # A mixture resolves its samples in the main process, not in the workers.
    if not hasattr(dataset, "set_epoch") or hasattr(dataset, "resolved"):
        return False
    return not any(map(_is_shared, getattr(dataset, "__dict__", {}).values()))


def _is_shared(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.is_shared())  # type: ignore[no-untyped-call]
    return type(value).__module__ == "multiprocessing.sharedctypes"


def _raised_where_read(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of torch's iterator, with deferred worker errors; its workers have started already."""
    if not _handler.install():
        return batches
    return _reading(batches)


def _reading(batches: Iterator[Any]) -> Iterator[Any]:
    # A local variable would keep the batch in memory while the loop's body runs.
    try:
        while True:
            yield _handler.read(batches)
    except StopIteration:
        return


def _is_main_thread() -> bool:
    # Python runs signal handlers only in the main thread.
    return threading.current_thread() is threading.main_thread()
