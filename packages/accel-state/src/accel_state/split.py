"""Splitting a list, tuple, dict or tensor between processes."""

from __future__ import annotations

from typing import Any

import torch

from accel_state.errors import ShapeMismatch, UnknownKind

__all__ = ("bounds_of", "split_inputs")


def bounds_of(length: int, count: int, index: int) -> tuple[int, int]:
    """Start and end of the part of process `index`; the first `length % count` processes have one item more.

    Example:
        >>> [bounds_of(5, 2, index) for index in range(2)]
        [(0, 3), (3, 5)]
    """
    size, larger = divmod(length, count)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def split_inputs(inputs: Any, count: int, index: int, apply_padding: bool = False) -> Any:
    """The part of `inputs` that belongs to process `index` of `count`.

    Args:
        inputs: a list, tuple (a named one gives plain tuples), tensor, or a dict of such with equal lengths; a data set
            with `select` works too.
        count: number of processes.
        index: the process whose part is wanted.
        apply_padding: add the last of all items until every process has equally many, so that results can be gathered.

    Raises:
        UnknownKind: `inputs` cannot be split.
        ShapeMismatch: the values of a dict have different lengths.
    """
    if count == 1:
        return inputs
    if isinstance(inputs, dict):
        _check_equal_lengths(inputs)
        return {key: split_inputs(value, count, index, apply_padding) for key, value in inputs.items()}
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):
        return inputs.select(_indices(len(inputs), count, index, apply_padding))
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(_indices(len(inputs), count, index, apply_padding), dtype=torch.long)]
    if isinstance(inputs, (list, tuple)):
        items = [inputs[position] for position in _indices(len(inputs), count, index, apply_padding)]
        # A part of a named tuple has fewer items than the class has fields.
        kind = tuple if hasattr(inputs, "_fields") else type(inputs)
        return kind(items)
    raise UnknownKind(
        f"split_between_processes was given an object of type {type(inputs).__name__}.",
        "It can split lists, tuples, tensors, and dicts of those.",
        "Turn it into a list first.",
    )


def _indices(length: int, count: int, index: int, padded: bool) -> list[int]:
    start, end = bounds_of(length, count, index)
    indices = list(range(start, end))
    if padded and length:
        longest = -(-length // count)
        indices += [length - 1] * (longest - len(indices))
    return indices


def _check_equal_lengths(inputs: dict[Any, Any]) -> None:
    lengths = {key: len(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeMismatch(
            "split_between_processes was given a dict.",
            "Its values have different lengths: " + ", ".join(f"{key}: {n}" for key, n in lengths.items()) + ".",
            "Give values of equal length.",
        )
