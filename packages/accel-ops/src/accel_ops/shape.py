"""Pads, slices and joins nested data, with or without regard to the shapes on other processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F

from accel_ops.checked_call import CheckedCall, check_alone, check_leaf, transport_of
from accel_ops.groups import Group
from accel_ops.tree import flatten, honor_type, leaves_with_paths, mapping_like, rebuild, recursively_apply
from accel_state.errors import SettingError, ShapeMismatch, UnknownKind
from accel_state.library import stack_level

__all__ = (
    "CannotPadNestedTensorWarning",
    "concatenate",
    "pad_across_processes",
    "pad_input_tensors",
    "slice_tensors",
)


class CannotPadNestedTensorWarning(UserWarning):
    """Issued when `pad_across_processes` finds a nested tensor, which it returns unchanged."""


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False, *, group: Group = None
) -> Any:
    """Pad each tensor of nested data along `dim` to the largest size that it has on any process.

    Tensors without that dimension, and those that already have the largest size, are returned unchanged. With one
    process all tensors are.

    Args:
        tensor: a tensor, or nested data with only tensors as leaves; numbers of dimensions and dtypes equal on all
            processes.
        dim: the dimension; negative ones count from the last.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of at the end.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        UnknownKind: a leaf is not a tensor; the error names its path.
        SettingError: a dtype cannot represent `pad_index`, or this process is not in the group.
        ShapeMismatch: on every process, when their calls, structures, numbers of dimensions or dtypes differ.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> tokens = pad_across_processes(tokens, dim=1, pad_index=tokenizer.pad_token_id)
        >>> tokens = gather(tokens)
    """
    transport = transport_of(group, "pad_across_processes")
    if transport.world_size == 1:
        check_alone("pad_across_processes", tensor, _check_or_nested)
        _warn_of_nested(tensor)
        leaves, _ = flatten(tensor, "pad_across_processes")
        _check_value(pad_index, [leaf for leaf in leaves if not leaf.is_nested])
        return recursively_apply(_as_it_is, tensor, error_on_other_type=True)
    if _warn_of_nested(tensor):
        return _pad_all_but_nested(tensor, dim, pad_index, pad_first, group)
    with CheckedCall(transport, "pad_across_processes", dim=dim) as call:
        plan, leaves = call.plan(tensor, shape_of=_dimensions, move=False)
        _check_value(pad_index, leaves)
        sizes = [_size(leaves[position], dim) for position in plan.order]
        longest = map(max, *call.all_gather_ints(plan, sizes))
        padded: list[Any] = list(leaves)
        for position, size in zip(plan.order, longest, strict=True):
            padded[position] = _padded(leaves[position], dim, size, pad_index, pad_first)
        return rebuild(tensor, iter(padded))


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad nested data with zeros along `dim`, so that a batch can be split evenly between processes.

    Args:
        tensor: a tensor, or nested data with only tensors as leaves.
        batch_size: size of the batch.
        num_processes: number of parts into which the batch is split.
        dim: the dimension of the batch.

    Raises:
        UnknownKind: a leaf is not a tensor; the error names its path.
    """
    size = -(-batch_size // num_processes) * num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        return _padded(leaf, dim, size, 0, False)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Nested data with `tensor[tensor_slice]` in place of each tensor.

    Args:
        data: nested data.
        tensor_slice: index or slice for each tensor.
        process_index: ignored; functions that split a batch in another way may need it.
        num_processes: ignored, as `process_index`.
    """
    return recursively_apply(itemgetter(tensor_slice), data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested data of the same structure leaf by leaf; tensors without dimensions are stacked.

    Args:
        data: the items, which have the same containers. A single item may have leaves that are not tensors; they are
            returned unchanged.
        dim: the dimension along which tensors are joined; their other dimensions must be equal.

    Raises:
        SettingError: there are no items.
        UnknownKind: a leaf of several items is not a tensor.
        ShapeMismatch: the structures differ.

    Example:
        >>> concatenate([{"a": torch.zeros(2)}, {"a": torch.ones(1)}])
        {'a': tensor([0., 0., 1.])}
    """
    if not data:
        raise SettingError("Cannot concatenate nested data.", "The list of items is empty.", "Pass at least one item.")
    return _Concatenation(dim).join(tuple(data))


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_nested


def _check_or_nested(path: str, leaf: torch.Tensor, operation: str) -> None:
    """Raise for a leaf that cannot be sent; nested tensors pass, because they are returned unchanged."""
    if not leaf.is_nested:
        check_leaf(path, leaf, operation)


def _warn_of_nested(data: Any) -> int:
    """Count the nested tensors in `data`, and warn if there are any."""
    nested = sum(_is_nested(leaf) for _, leaf in leaves_with_paths(data))
    if nested:
        warnings.warn(
            f"pad_across_processes() cannot pad nested tensors. It returns the {nested} nested tensors in its input "
            "unchanged.",
            CannotPadNestedTensorWarning,
            stacklevel=stack_level(),
        )
    return nested


def _pad_all_but_nested(tensor: Any, dim: int, pad_index: float, pad_first: bool, group: Group) -> Any:
    others = recursively_apply(lambda leaf: torch.empty(()) if leaf.is_nested else leaf, tensor)
    padded = pad_across_processes(others, dim, pad_index, pad_first, group=group)
    before = (leaf for _, leaf in leaves_with_paths(tensor))
    after = (leaf for _, leaf in leaves_with_paths(padded))
    return rebuild(padded, (old if _is_nested(old) else new for old, new in zip(before, after, strict=True)))


def _check_value(value: float, leaves: Sequence[torch.Tensor]) -> None:
    for dtype in {leaf.dtype for leaf in leaves}:
        if dtype.is_floating_point or dtype.is_complex:
            continue
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if value != int(value) or not least <= value <= most:
            raise SettingError(
                f"Cannot pad with pad_index={value} in pad_across_processes().",
                f"Tensors of {dtype} cannot represent it.",
                "Pass another value, or convert the tensors first.",
            )


class _Concatenation:
    """One call of `concatenate`; it stores the path of the current leaf, for errors."""

    __slots__ = ("_join_tensors", "_path")

    def __init__(self, dim: int) -> None:
        self._join_tensors: Any = torch.cat if dim == 0 else partial(torch.cat, dim=dim)
        self._path: list[Any] = []

    def join(self, parts: tuple[Any, ...], *key: Any) -> Any:
        """Join `parts`, which are under `key` in their containers."""
        self._path += key
        first = parts[0]
        kind = type(first)
        joined: Any
        # Exact types first, because `is_torch_tensor` is slow for other objects.
        if kind is list or kind is tuple:
            joined = self._sequence(parts)
            if kind is tuple:
                joined = tuple(joined)
        elif kind is dict:
            joined = self._mapping(parts)
        elif isinstance(first, torch.Tensor):
            self._check_tensors(parts)
            joined = self._join_tensors(parts) if first.dim() else torch.stack(parts)
        elif isinstance(first, (list, tuple)):
            joined = honor_type(first, self._sequence(parts))
        elif isinstance(first, Mapping):
            joined = mapping_like(first, self._mapping(parts))
        else:
            if len(parts) > 1:
                self._check_tensors(parts)
            joined = first
        if key:
            self._path.pop()
        return joined

    def _sequence(self, parts: tuple[Any, ...]) -> list[Any]:
        length = len(parts[0])
        for part in parts:
            if not isinstance(part, (list, tuple)) or len(part) != length:
                raise self._structure_error()
        return self._columns(range(length), list(zip(*parts, strict=True)))

    def _mapping(self, parts: tuple[Any, ...]) -> dict[Any, Any]:
        first = parts[0]
        for part in parts:
            if not isinstance(part, Mapping) or part.keys() != first.keys():
                raise self._structure_error()
        columns = [tuple([part[name] for part in parts]) for name in first]
        return dict(zip(first, self._columns(first, columns), strict=True))

    def _columns(self, keys: Iterable[Any], columns: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The parts under each key, joined."""
        if columns and type(columns[0][0]) is torch.Tensor:
            # Most containers have only tensors, which are joined without a check of each.
            try:
                return list(map(self._join_tensors, columns))
            except (TypeError, RuntimeError):
                pass
        return [self.join(column, key) for key, column in zip(keys, columns, strict=True)]

    def _check_tensors(self, parts: tuple[Any, ...]) -> None:
        for part in parts:
            if not isinstance(part, torch.Tensor):
                where = self._where()
                raise UnknownKind(
                    "Cannot concatenate nested data with leaves that are not tensors.",
                    f"{f'The leaf {where}' if where else 'An item'} is of type {type(part).__name__}.",
                    "Pass tensors, or lists, tuples and mappings of tensors.",
                ) from None

    def _structure_error(self) -> ShapeMismatch:
        where = self._where()
        return ShapeMismatch(
            "Cannot concatenate data of different structures.",
            f"{f'At {where}' if where else 'At the top'}, types, lengths or keys differ.",
            "Pass items that have the same keys and lengths everywhere.",
        )

    def _where(self) -> str:
        return "".join(f"[{name!r}]" for name in self._path)


def _as_it_is(leaf: torch.Tensor) -> torch.Tensor:
    return leaf


def _dimensions(leaf: torch.Tensor) -> int:
    return leaf.dim()


def _size(leaf: torch.Tensor, dim: int) -> int:
    return leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else 0


def _padded(leaf: torch.Tensor, dim: int, size: int, value: float, first: bool) -> torch.Tensor:
    missing = size - _size(leaf, dim)
    if missing <= 0 or not -leaf.dim() <= dim < leaf.dim():
        return leaf
    # Amounts are given in pairs (before, after), the last dimension first.
    before = [0, 0] * (leaf.dim() - 1 - dim % leaf.dim())
    return F.pad(leaf, [*before, missing, 0] if first else [*before, 0, missing], value=value)
