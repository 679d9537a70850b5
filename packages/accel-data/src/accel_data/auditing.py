"""`audit`: which process receives which samples in an epoch, and whether each sample is read exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from accel_data.loader import PreparedLoader
from accel_data.mesh import coordinates
from accel_data.progress import Progress
from accel_ops.objects import gather_object
from accel_ops.rng import restore, snapshot
from accel_state import current
from accel_state.errors import UnknownKind
from accel_state.gradient import GradientAccumulationPlugin, GradientState

__all__ = ("Audit", "audit")


@dataclass(frozen=True)
class Audit:
    """The samples of an epoch.

    The id of a sample is its index. In a stream that every process reads, it is "DataLoader worker:position". In a
    stream that is sharded at its source, it is a digest of the contents, so equal samples count as one.

    Args:
        per_process: number of samples that each process receives, without padding.
        added: number of samples that pad steps, over all processes.
        twice: samples that were read more than once.
        missing: samples that were not read, if their ids are known.
    """

    per_process: tuple[int, ...]
    added: int
    twice: tuple[Any, ...]
    missing: tuple[Any, ...]

    @property
    def exact(self) -> bool:
        """Whether every sample was read exactly once."""
        return not self.twice and not self.missing


def audit(loader: Any, *others: Any) -> Audit:
    """Simulate the next epoch on all processes, without reading the samples of a map-style data set.

    The position of the loader and the random-number generators do not change. Call it on every process.

    Args:
        loader: a prepared loader.
        others: the loaders of further processes, if one process simulates them.

    Raises:
        UnknownKind: `loader` is not a prepared loader.

    Example:
        >>> assert audit(train_loader).exact
    """
    shards = [_ids_of(shard) for shard in (loader, *others)]
    if not others and _shared(loader):
        shards = _one_of_each(gather_object([(_index(loader), shards[0])]))
    counted = Counter(sample for ids, _ in shards for sample in ids)
    return Audit(
        per_process=tuple(len(ids) for ids, _ in shards),
        added=sum(added for _, added in shards),
        twice=tuple(sorted(sample for sample, count in counted.items() if count > 1)),
        missing=_missing(loader, counted),
    )


def _ids_of(loader: Any) -> tuple[list[Hashable], int]:
    """The sample ids of one process, and the number of padding samples."""
    if not isinstance(loader, PreparedLoader):
        raise UnknownKind(
            f"Cannot audit a {type(loader).__name__}.",
            "Only a prepared loader defines how its samples are sharded.",
            "Give a loader that prepare or prepare_data_loader returned.",
        )
    source, generators, gradient = loader.source.local, snapshot(), current.gradient()
    upcoming = source.upcoming_rng()
    shadow: Any = loader.auditing(Progress(loader.progress.epoch), GradientState.of(GradientAccumulationPlugin()))
    shadow.progress.replay = loader.progress.replay
    ids: list[Hashable] = []
    added = 0
    try:
        for batch in shadow:
            received = batch if isinstance(batch, list) else [batch]
            padding = shadow.progress.padding
            real = None if padding is None else padding.of(_index(loader))
            kept = received if real is None else received[:real]
            ids += kept
            added += len(received) - len(kept)
    finally:
        current.set_gradient(gradient)
        restore(generators)
        if upcoming is not None:
            source.upcoming_rng(upcoming)
    return ids, added


def _shared(loader: Any) -> bool:
    world_size = current.process_or_start().world_size
    return world_size > 1 and max(coordinates(loader.torch_device_mesh, world_size)) + 1 == loader.source.processes


def _index(loader: Any) -> int:
    """The index of this process's shard of the data."""
    if not _shared(loader):
        return int(loader.source.index)
    process = current.process_or_start()
    return coordinates(loader.torch_device_mesh, process.world_size)[process.rank]


def _one_of_each(gathered: list[tuple[int, Any]]) -> list[Any]:
    """One process for each shard of the data, in order."""
    by_index = dict(reversed(gathered))
    return [by_index[index] for index in sorted(by_index)]


def _missing(loader: Any, counted: Counter[Hashable]) -> tuple[Any, ...]:
    expected = loader.source.local.sample_ids()
    if expected is not None:
        return tuple(sample for sample in expected if sample not in counted)
    last: dict[str, int] = {}
    for sample in counted:
        worker, separator, position = str(sample).partition(":")
        if separator:
            last[worker] = max(last.get(worker, -1), int(position))
    ids = (f"{worker}:{position}" for worker, end in last.items() for position in range(end))
    return tuple(sample for sample in ids if sample not in counted)
