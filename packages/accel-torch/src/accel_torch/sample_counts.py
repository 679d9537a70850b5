"""What the sources of mixtures gave so far, logged to the run's JSON lines for `accel runs samples`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_tracking.group import TrackerGroup

__all__ = ("log_sample_counts",)


def log_sample_counts(tracking: TrackerGroup, loaders: Iterable[Any], step: int | None) -> None:
    """Add a table of the sources of every mixture that a prepared loader reads; nothing where there is none.

    Args:
        tracking: the trackers of this process.
        loaders: prepared ones.
        step: where on the x-axis the table belongs.
    """
    rows = [row for number, loader in enumerate(loaders) for row in _rows(number, loader)]
    if not rows:
        return
    from accel_tracking.commands.samples import COLUMNS, TABLE

    for tracker in tracking:
        if tracker.name == "jsonl":
            tracker.log_table(TABLE, list(COLUMNS), rows, step=step)


def _rows(number: int, loader: Any) -> list[list[Any]]:
    dataset: Any = getattr(loader, "dataset", None)
    progress = getattr(loader, "progress", None)
    if not hasattr(dataset, "mixture_state") or progress is None or progress.samples is None:
        return []
    counts = dataset.counts(progress.samples, progress.epoch)
    return [[number, name, one.samples, one.epochs, one.asked, one.given] for name, one in counts.items()]
