"""Ids of the samples that a launched process has at hand, for the record of its failure.

The shard of each prepared loader keeps the batches of indices that it draws, which costs a batch some nanoseconds. An
error is recorded with the batch that was trained on. A process that is killed records nothing, so that one which was
started again also writes what it draws into a file beside its status.
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
from accel_state.hang_report.progress import PROGRESS, STATUS_FOLDER, sample_file
from accel_torch.observers import RUN_OBSERVERS, RunObserver

__all__ = ("DrawnBatches", "SampleRecorder", "record_samples")

_KEPT: Final = 256
"""Batches whose ids are kept: those that DataLoader workers read ahead, and the last ones that were trained on."""

_BATCH: Final = itemgetter(1)
"""The batch of one that has a number."""


class DrawnBatches:
    """The last batches of indices that a shard drew in an epoch.

    Args:
        begins: called when an epoch begins.
        write: called with the text of the last two batches after each, or None.
    """

    def __init__(self, begins: Callable[[], None], write: Callable[[str], None] | None = None) -> None:
        self._batches: deque[tuple[int, Sequence[Any]]] = deque(maxlen=_KEPT)
        self._begins, self._write = begins, write

    def keep(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        """See `Drawn`; the epoch begins when its first batch is read."""
        return chain.from_iterable(self._kept(batches))

    def _kept(self, batches: Iterator[list[int]]) -> Iterator[Iterator[list[int]]]:
        kept = self._batches
        kept.clear()
        self._begins()
        numbered = enumerate(batches)
        if self._write is None:
            # Iterators of C alone: `append` returns None, so that each batch is kept and passed on.
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
        """The batch of a number from 0 in this epoch; empty where it is not kept."""
        if not self._batches:
            return ()
        index = number - self._batches[0][0]
        return self._batches[index][1] if 0 <= index < len(self._batches) else ()


class SampleRecorder(RunObserver):
    """Lets every prepared loader keep the ids of its samples; see `RunObserver`."""

    def loader_prepared(self, accelerator: Any, loader: Any) -> None:
        """Let the shard of a loader keep what it draws."""
        source = getattr(loader, "source", None)
        while source is not None and not isinstance(getattr(source, "shard", None), BatchSamplerShard):
            source = getattr(source, "inner", None)
        if source is None:
            return
        known = weakref.ref(loader)

        def ids(read: int | None = None) -> list[str]:
            progress = getattr(known(), "progress", None)
            if progress is None:
                return []
            return [str(sample) for sample in drawn.batch(progress.received - 1 if read is None else read)]

        def learn() -> None:
            PROGRESS.samples = ids

        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        write = sample_file(os.environ[STATUS_FOLDER], accelerator.process_index) if restarted else None
        drawn = DrawnBatches(learn, write)
        source.shard.drawn = drawn


def record_samples() -> None:
    """Let a recorder join `RUN_OBSERVERS`, once a process, where a launcher started it."""
    if not any(isinstance(one, SampleRecorder) for one in RUN_OBSERVERS):
        RUN_OBSERVERS.append(SampleRecorder())
