"""Which samples an epoch gives to which process: each once, as was promised, or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from accel_data.mesh import coordinates
from accel_data.prepared import PreparedLoader
from accel_data.progress import Progress
from accel_ops.objects import gather_object
from accel_ops.rng import restore, snapshot
from accel_state import current
from accel_state.errors import UnknownKind
from accel_state.gradient import GradientAccumulationPlugin, GradientState

__all__ = ("Audit", "audit")


@dataclass(frozen=True)
class Audit:
    """What an epoch gives.

    Samples are named by their index; those of a stream that every process reads by "loading process:position";
    those of a stream that is divided at its source by their contents, so equal samples count as one.

    Args:
        per_process: number of samples that each process gets, without those that were added.
        added: samples that fill up steps, over all processes.
        twice: samples that came more than once.
        missing: samples that did not come, as far as it is known that there are such.
    """

    per_process: tuple[int, ...]
    added: int
    twice: tuple[Any, ...]
    missing: tuple[Any, ...]

    @property
    def exact(self) -> bool:
        """Whether every sample came once."""
        return not self.twice and not self.missing


def audit(loader: Any, *others: Any) -> Audit:
    """Walk the epoch that comes next, on all processes, without reading the samples of a data set with indices.

    The loader stays where it is, and no generator advances. All processes have to call it.

    Args:
        loader: a prepared loader.
        others: those of further processes, where one process plays all of them.

    Raises:
        UnknownKind: it is no prepared loader.

    Example:
        >>> assert audit(train_loader).exact
    """
    parts = [_walk(part) for part in (loader, *others)]
    if not others and _shared(loader):
        parts = _one_of_each(gather_object([(_index(loader), parts[0])]))
    counted = Counter(name for names, _ in parts for name in names)
    return Audit(
        per_process=tuple(len(names) for names, _ in parts),
        added=sum(added for _, added in parts),
        twice=tuple(sorted(name for name, count in counted.items() if count > 1)),
        missing=_missing(loader, counted),
    )


def _walk(loader: Any) -> tuple[list[Hashable], int]:
    """Names of the samples of one process, and how many were added."""
    if not isinstance(loader, PreparedLoader):
        raise UnknownKind(
            f"audit was called with a {type(loader).__name__}.",
            "Only a prepared loader knows how its samples are divided.",
            "Give what prepare or prepare_data_loader returned.",
        )
    source, generators, gradient = loader.source, snapshot(), current.gradient()
    drawn, again = source.upcoming(), source.draws.again
    shadow: Any = loader.auditing(Progress(loader.progress.epoch), GradientState.of(GradientAccumulationPlugin()))
    shadow.source.draws.again = again
    names: list[Hashable] = []
    added = 0
    try:
        for batch in shadow:
            given = batch if isinstance(batch, list) else [batch]
            padding = shadow.progress.padding
            real = None if padding is None else padding.of(_index(loader))
            kept = given if real is None else given[:real]
            names += kept
            added += len(given) - len(kept)
    finally:
        current.set_gradient(gradient)
        restore(generators)
        if drawn is not None:
            source.upcoming(drawn)
    return names, added


def _shared(loader: Any) -> bool:
    world_size = current.process_or_start().world_size
    return world_size > 1 and max(coordinates(loader.torch_device_mesh, world_size)) + 1 == loader.source.processes


def _index(loader: Any) -> int:
    """Which part of the data this process gets."""
    if not _shared(loader):
        return int(loader.source.index)
    process = current.process_or_start()
    return coordinates(loader.torch_device_mesh, process.world_size)[process.rank]


def _one_of_each(gathered: list[tuple[int, Any]]) -> list[Any]:
    """One process for each part of the data, in order."""
    by_index = dict(reversed(gathered))
    return [by_index[index] for index in sorted(by_index)]


def _missing(loader: Any, counted: Counter[Hashable]) -> tuple[Any, ...]:
    expected = loader.source.names()
    if expected is not None:
        return tuple(name for name in expected if name not in counted)
    last: dict[str, int] = {}
    for name in counted:
        worker, found, position = str(name).partition(":")
        if found:
            last[worker] = max(last.get(worker, -1), int(position))
    places = (f"{worker}:{position}" for worker, end in last.items() for position in range(end))
    return tuple(place for place in places if place not in counted)
