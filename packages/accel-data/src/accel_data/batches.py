"""Slices and concatenates batches by their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from accel_ops.tree import honor_type, leaves_with_paths, map_children
from accel_state.errors import DataError

__all__ = ("cut", "join", "samples_in")


def samples_in(batch: Any) -> int | None:
    """Number of samples in a batch: the first dimension of its first tensor with dimensions, else the length of a list.

    None if it has neither.
    """
    for _, leaf in leaves_with_paths(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return len(batch) if isinstance(batch, list) else None


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch.

    Tensors with one entry per sample in the first dimension, and lists with one object per sample, are sliced. Other
    leaves are unchanged.
    """

    def samples(leaf: Any) -> Any:
        chosen = leaf[start:stop]
        return chosen if isinstance(leaf, torch.Tensor) else honor_type(leaf, chosen)

    return _with_sample_leaves(batch, samples_in(batch), samples)


def join(batches: Sequence[Any]) -> Any:
    """Concatenate batches of one structure.

    Raises:
        DataError: their structures or the shapes of their samples differ.
    """
    if len(batches) == 1:
        return batches[0]
    sizes = [samples_in(batch) for batch in batches]
    columns = [_sample_leaves(batch, size) for batch, size in zip(batches, sizes, strict=True)]
    if len({len(column) for column in columns}) != 1:
        raise _unequal("They have different structures.")
    joined = iter([_joined(column) for column in zip(*columns, strict=True)])
    return _with_sample_leaves(batches[0], sizes[0], lambda _: next(joined))


def _sample_leaves(batch: Any, size: int | None) -> list[Any]:
    leaves: list[Any] = []

    def keep(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    _with_sample_leaves(batch, size, keep)
    return leaves


def _with_sample_leaves(batch: Any, size: int | None, replace: Callable[[Any], Any]) -> Any:
    """The batch with each leaf that has one entry per sample replaced."""
    if isinstance(batch, torch.Tensor):
        return replace(batch) if batch.ndim and batch.shape[0] == size else batch
    if _lists_samples(batch, size):
        return replace(batch)
    return map_children(batch, lambda item: _with_sample_leaves(item, size, replace))


def _joined(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return honor_type(column[0], _chained(column))
    try:
        return torch.cat(list(column))
    except (RuntimeError, TypeError) as error:
        raise _unequal(f"Their tensors cannot be concatenated: {error}") from error


def _chained(column: Sequence[Any]) -> Iterator[Any]:
    for leaf in column:
        yield from leaf


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
        "Cannot dispatch a batch: the main process cannot concatenate batches and split them between processes.",
        obstacle,
        "Let the collate function return batches of one structure and sample shape, use split_batches=True, or let "
        "every process read its own batches (dispatch_batches=False).",
    )
