"""Ids of the current samples of a launched process, for the record of a failure.

Each prepared loader stores the batches of indices that it draws, which costs some nanoseconds per batch. An error is
recorded with the current batch. A killed process cannot record anything, so a restarted process also writes the indices
to its status record.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, filterfalse
from operator import itemgetter
from typing import Any, Final

from accel_data.sharding import BatchSamplerShard
from accel_state.watch.record import STATUS_RECORD
from accel_torch.hooks import PROCESS_HOOKS, Hook

__all__ = ("DrawnBatches", "SampleRecorder", "drawn_batches", "record_samples")

_KEPT: Final = 256
"""The number of batches whose ids are stored: those that DataLoader workers prefetch, and the last ones of the loop."""

_BATCH: Final = itemgetter(1)
"""The batch with a number."""


class DrawnBatches:
    """The last batches of indices that a loader drew in an epoch.

    Args:
        begins: called when an epoch begins.
        write: called after each batch with the text of the last two, or None.
    """

    def __init__(self, begins: Callable[[], None], write: Callable[[str], None] | None = None) -> None:
        self._batches: deque[tuple[int, Sequence[Any]]] = deque(maxlen=_KEPT)
        self._begins, self._write = begins, write

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # It belongs to one loader of this process: a deep copy and an unpickled loader have None instead.
        return type(None), ()

    def keep(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        """See `Drawn`; the epoch begins when its first batch is read."""
        return chain.from_iterable(self._kept(batches))

    def _kept(self, batches: Iterator[list[int]]) -> Iterator[Iterator[list[int]]]:
        kept = self._batches
        kept.clear()
        self._begins()
        numbered = enumerate(batches)
        if self._write is None:
            # Only C iterators, for speed: `append` returns None, so that each batch is stored and passed on.
            yield map(_BATCH, filterfalse(kept.append, numbered))
        else:
            yield self._written(numbered, self._write)

    def _written(self, numbered: Iterator[tuple[int, list[int]]], write: Callable[[str], None]) -> Iterator[list[int]]:
        kept = self._batches
        for one in numbered:
            kept.append(one)
            write(json.dumps([str(sample) for _, last in (*kept,)[-2:] for sample in last]))
            yield one[1]

    def batch(self, number: int) -> Sequence[Any]:
        """The batch of a number in this epoch, from 0; empty if it is no longer stored."""
        if not self._batches:
            return ()
        index = number - self._batches[0][0]
        return self._batches[index][1] if 0 <= index < len(self._batches) else ()


def drawn_batches(loader: Any) -> DrawnBatches | None:
    """The batches that a prepared loader drew last; None if it does not store them."""
    shard = _shard_of(loader)
    drawn = None if shard is None else shard.drawn
    return drawn if isinstance(drawn, DrawnBatches) else None


def _shard_of(loader: Any) -> BatchSamplerShard | None:
    shard = getattr(getattr(getattr(loader, "source", None), "local", None), "shard", None)
    return shard if isinstance(shard, BatchSamplerShard) else None


class SampleRecorder(Hook):
    """Makes every prepared loader store the ids of its samples."""

    def loader_prepared(self, session: Any, loader: Any) -> None:
        """Make a loader store the indices that it draws, unless it does already."""
        shard = _shard_of(loader)
        if shard is None or shard.drawn is not None:
            return
        loader_reference = weakref.ref(loader)

        def ids(read: int | None = None) -> list[str]:
            progress = getattr(loader_reference(), "progress", None)
            if progress is None:
                return []
            return [str(sample) for sample in drawn.batch(progress.received - 1 if read is None else read)]

        def learn() -> None:
            STATUS_RECORD.samples = ids

        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        drawn = DrawnBatches(learn, STATUS_RECORD.write_samples if restarted else None)
        shard.drawn = drawn


def record_samples() -> None:
    """Add a recorder to `PROCESS_HOOKS`, once in a process that a launcher started."""
    if not any(isinstance(one, SampleRecorder) for one in PROCESS_HOOKS):
        PROCESS_HOOKS.append(SampleRecorder())
