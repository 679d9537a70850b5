"""What `log` adds: reductions over processes, and the sample counts of mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_ops import gather_object
from accel_state import current
from accel_state.errors import SettingError, ShapeMismatch

if TYPE_CHECKING:
    from accel_tracking.group import TrackerGroup

__all__ = ("REDUCTIONS", "log_sample_counts", "reduced")

REDUCTIONS: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}
"""How the values of all processes are reduced to one."""


def reduced(values: Mapping[str, Any], reduction: str) -> dict[str, float]:
    """Reduce the values of all processes to one value for each name, in one collective; called on every process.

    Args:
        values: numbers by name, or nested dicts of numbers, whose names are joined with slashes.
        reduction: one of `REDUCTIONS`.

    Raises:
        SettingError: `reduction` is unknown, or a value is not a number; raised on every process.
        ShapeMismatch: the processes have different names; raised on every process.
    """
    if reduction not in REDUCTIONS:
        raise SettingError(
            f"Cannot log with reduce={reduction!r}.",
            "There is no such reduction.",
            f"Choose from {', '.join(REDUCTIONS)}.",
        )
    own = _numbers(dict(_flat(values)))
    everyones: list[dict[str, float | None]] = gather_object([own])
    _check_names(everyones)
    _check_numbers(everyones)
    combine = REDUCTIONS[reduction]
    return {name: combine([theirs[name] for theirs in everyones]) for name in own}  # type: ignore[misc]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers by name; None for a value that is not a number, so that every process can report it."""
    numbers: dict[str, float] = {}
    alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            alike.setdefault((value.device, value.dtype), {})[name] = value.detach().reshape(())
    for tensors in alike.values():
        # One copy from the device for all numbers.
        numbers.update(zip(tensors, map(float, torch.stack(list(tensors.values())).tolist()), strict=True))
    return {name: numbers[name] if name in numbers else _number(value) for name, value in values.items()}


def _number(value: Any) -> float | None:
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _check_names(everyones: list[dict[str, Any]]) -> None:
    shared = set.intersection(*(set(theirs) for theirs in everyones))
    extra = {rank: sorted(set(theirs) - shared) for rank, theirs in enumerate(everyones)}
    if any(extra.values()):
        listed = "; ".join(f"process {rank}: {', '.join(names)}" for rank, names in extra.items() if names)
        raise ShapeMismatch(
            f"Process {current.process().rank} logged {len(everyones[current.process().rank])} metrics with reduce=.",
            f"Some are not logged by every process: {listed}.",
            "Log the same names on every process, or log these metrics without reduce=.",
        )


def _check_numbers(everyones: list[dict[str, float | None]]) -> None:
    wrong = [(name, rank) for rank, theirs in enumerate(everyones) for name, value in theirs.items() if value is None]
    if wrong:
        listed = ", ".join(f"{name!r} (process {rank})" for name, rank in wrong)
        raise SettingError(
            "Cannot log with reduce=...",
            f"These values are not numbers: {listed}.",
            "Log other values, such as texts and images, without reduce=.",
        )


def log_sample_counts(tracking: TrackerGroup, loaders: Iterable[Any], step: int | None) -> None:
    """Log the sample counts of every mixture that a prepared loader reads.

    Args:
        tracking: the trackers of this process.
        loaders: prepared loaders.
        step: the position on the x-axis.
    """
    rows = [row for number, loader in enumerate(loaders) for row in _rows(number, loader)]
    if not rows:
        return
    from accel_tracking.sample_counts import COLUMNS, TABLE

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
