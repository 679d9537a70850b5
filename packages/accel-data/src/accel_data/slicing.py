"""Cutting a batch into samples and putting batches together, in any nesting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from accel_ops.tree import honor_type, leaves_with_paths, map_children
from accel_state.errors import DataError

__all__ = ("cut", "join", "samples_in")


def samples_in(batch: Any) -> int | None:
    """Number of samples in a batch: the first dimension of its first tensor that has one, else the length of a list.

    None when it has neither.
    """
    for _, leaf in leaves_with_paths(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return len(batch) if isinstance(batch, list) else None


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch.

    Tensors whose first dimension has one entry for each sample are cut, and lists that have one object for each; other
    leaves are kept.
    """
    size = samples_in(batch)

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[start:stop] if value.ndim and value.shape[0] == size else value
        if _lists_samples(value, size):
            return honor_type(value, value[start:stop])
        return map_children(value, walk)

    return walk(batch)


def join(batches: Sequence[Any]) -> Any:
    """Batches of one structure as one batch.

    Raises:
        DataError: they differ in structure, or in the shape of their samples.
    """
    if len(batches) == 1:
        return batches[0]
    sizes = [samples_in(batch) for batch in batches]
    parts = [_sample_parts(batch, size) for batch, size in zip(batches, sizes, strict=True)]
    if len({len(found) for found in parts}) != 1:
        raise _unequal("They have different structures.")
    joined = iter([_joined(column) for column in zip(*parts, strict=True)])
    return _with_parts(batches[0], sizes[0], lambda _: next(joined))


def _sample_parts(batch: Any, size: int | None) -> list[Any]:
    found: list[Any] = []

    def keep(part: Any) -> Any:
        found.append(part)
        return part

    _with_parts(batch, size, keep)
    return found


def _with_parts(batch: Any, size: int | None, replace: Callable[[Any], Any]) -> Any:
    """The batch with everything in it that has one entry for each sample replaced."""

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return replace(value) if value.ndim and value.shape[0] == size else value
        return replace(value) if _lists_samples(value, size) else map_children(value, walk)

    return walk(batch)


def _joined(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return honor_type(column[0], _chained(column))
    try:
        return torch.cat(list(column))
    except (RuntimeError, TypeError) as error:
        raise _unequal(f"Their tensors cannot be put together: {error}") from error


def _chained(column: Sequence[Any]) -> Iterator[Any]:
    for part in column:
        yield from part


def _lists_samples(value: Any, size: int | None) -> bool:
    if type(value) not in (list, tuple) or len(value) != size:
        return False
    return not any(isinstance(item, torch.Tensor) or _is_container(item) for item in value)


def _is_container(value: Any) -> bool:
    leaf: list[Any] = []
    map_children(value, lambda item: item, leaf.append)
    return not leaf


def _unequal(obstacle: str) -> DataError:
    return DataError(
        "The main process was to put batches together that it cuts for the other processes.",
        obstacle,
        "Let the collate function give batches of one structure and sample shape, use split_batches=True, or let every "
        "process read for itself (dispatch_batches=False).",
    )
