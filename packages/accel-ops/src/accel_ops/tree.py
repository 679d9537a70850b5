"""Nested data: lists, tuples, named tuples, mappings and dataclasses with tensors at their leaves.

Everything in this package that takes "a tensor or nested data" walks it with the functions here, so that all operations
agree on what a container is, how it is rebuilt, and what the path to a leaf is called.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

import torch

from accel_state.errors import UnknownKind

__all__ = (
    "Structure",
    "TensorInformation",
    "children",
    "flatten",
    "honor_type",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "leaves_with_paths",
    "map_children",
    "mapping_like",
    "name_of",
    "rebuild",
    "recursively_apply",
)

T = TypeVar("T")

Structure = Any
"""A hashable picture of the containers around the leaves: equal for data that differ in their leaves alone."""


@dataclasses.dataclass
class TensorInformation:
    """What is known of a tensor without its contents."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> TypeGuard[TensorInformation]:
    """Whether an object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether an object is a named tuple (of `collections` or `typing`)."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: T, generator: Iterable[Any]) -> T:
    """The values of `generator` in a sequence of the same type as `obj`, be it a named tuple or not."""
    make: Any = type(obj)
    return make(*generator) if is_namedtuple(obj) else make(generator)  # type: ignore[no-any-return]


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`func(leaf, *args, **kwargs)` for each leaf that passes `test_type`, in containers of the same types.

    Other leaves stay as they are, unless `error_on_other_type`.

    Raises:
        UnknownKind: a leaf does not pass and `error_on_other_type` is set; the path of the leaf is named.

    Example:
        >>> recursively_apply(lambda tensor: tensor.shape[0], {"a": torch.zeros(3, 2), "b": "text"})
        {'a': 3, 'b': 'text'}
    """

    apply = func if not (args or kwargs) else _with_arguments(func, args, kwargs)
    # The type that is met most, if it passes the test for certain, is looked at before a call is made for the leaf.
    usual = torch.Tensor if test_type is is_torch_tensor else None

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return {key: apply(item) if type(item) is usual else walk(item) for key, item in value.items()}
        if kind is list:
            return [apply(item) if type(item) is usual else walk(item) for item in value]
        if kind is tuple:
            return tuple([apply(item) if type(item) is usual else walk(item) for item in value])
        if test_type(value):
            return apply(value)
        return map_children(value, walk, refuse)

    def refuse(value: Any) -> None:
        if error_on_other_type:
            raise _unsupported(data, value, test_type, name_of(func))

    return walk(data)


def _with_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda leaf: func(leaf, *args, **kwargs)


def rebuild(data: Any, leaves: Iterator[Any]) -> Any:
    """`data` with its leaves, in the order of `flatten`, replaced by those of `leaves`; other values are kept."""

    following, usual = leaves.__next__, torch.Tensor

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return {key: following() if type(item) is usual else walk(item) for key, item in value.items()}
        if kind is list:
            return [following() if type(item) is usual else walk(item) for item in value]
        if kind is tuple:
            return tuple([following() if type(item) is usual else walk(item) for item in value])
        if isinstance(value, torch.Tensor):
            return following()
        return map_children(value, walk)

    return walk(data)


def flatten(data: Any, operation: str) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of `data` and a hashable picture of the containers around them.

    Raises:
        UnknownKind: a leaf is no tensor; its path and `operation` are named.
    """
    leaves: list[torch.Tensor] = []
    # Appending returns None, which is what a leaf looks like in the structure.
    leaf, usual = leaves.append, torch.Tensor

    def walk(value: Any) -> Structure:
        kind = type(value)
        if kind is dict:
            parts = [leaf(item) if type(item) is usual else walk(item) for item in value.values()]
            return dict, tuple(value), tuple(parts)
        if kind is list or kind is tuple:
            return kind, tuple([leaf(item) if type(item) is usual else walk(item) for item in value])
        if isinstance(value, torch.Tensor):
            return leaf(value)
        named = _children(value)
        if named is None:
            raise _unsupported(data, value, is_torch_tensor, operation)
        return kind, tuple([name for name, _ in named]), tuple([walk(item) for _, item in named])

    return leaves, walk(data)


def map_children(value: Any, walk: Callable[[Any], Any], refuse: Callable[[Any], None] | None = None) -> Any:
    """A container of any kind with `walk` applied to what it holds; others are kept, after `refuse` was told."""
    if isinstance(value, (list, tuple)):
        return honor_type(value, [walk(item) for item in value])
    if isinstance(value, Mapping):
        return mapping_like(value, {key: walk(item) for key, item in value.items()})
    if _is_dataclass(value):
        return _dataclass_like(value, walk)
    if refuse is not None:
        refuse(value)
    return value


def children(value: Any) -> Iterable[Any]:
    """What a container of any kind holds; nothing for a value that is not a container."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (dict, Mapping)):  # a dict is recognised sooner than a mapping
        return value.values()
    if _is_dataclass(value) and not isinstance(value, TensorInformation):
        return (getattr(value, field.name) for field in dataclasses.fields(value))
    return ()


def mapping_like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `original` that holds `items`."""
    make: Any = type(original)
    if hasattr(original, "default_factory"):
        again: Any = copy.copy(original)
        again.update(items)
        return again
    return make(items)


def leaves_with_paths(data: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf with its path, such as `['image'][0].mask`; the path is empty when `data` is a leaf itself."""
    yield from _with_paths("", data)


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    return getattr(function, "__name__", None) or type(function).__name__


def _with_paths(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    named = None if isinstance(value, (torch.Tensor, TensorInformation)) else _children(value)
    if named is None:
        yield path, value
        return
    for name, item in named:
        yield from _with_paths(path + name, item)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Names, as in a path, and values of what a container holds; None for what is no container."""
    if is_namedtuple(value):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if _is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _is_dataclass(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__")


def _dataclass_like(original: Any, walk: Callable[[Any], Any]) -> Any:
    """The object itself when no field changed, so that a configuration inside of a batch keeps its identity."""
    changed = {}
    for field in dataclasses.fields(original):
        before = getattr(original, field.name)
        after = walk(before)
        if after is not before and not _same_items(before, after):
            changed[field.name] = after
    if not changed:
        return original
    again = copy.copy(original)
    for name, value in changed.items():
        object.__setattr__(again, name, value)
    return again


def _same_items(before: Any, after: Any) -> bool:
    """Whether a rebuilt container holds the very objects of the one it was made from."""
    if type(before) is not type(after) or isinstance(before, torch.Tensor):
        return False
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(_is_or_same(a, b) for a, b in zip(before, after, strict=True))
    if isinstance(before, Mapping):
        return len(before) == len(after) and all(_is_or_same(value, after.get(key)) for key, value in before.items())
    return False


def _is_or_same(before: Any, after: Any) -> bool:
    return before is after or _same_items(before, after)


def _unsupported(data: Any, value: Any, test_type: Callable[[Any], bool], operation: str) -> UnknownKind:
    path = next((path for path, leaf in leaves_with_paths(data) if leaf is value), "")
    where = f"The leaf {path}" if path else "The value"
    return UnknownKind(
        f"{operation}() was given nested data that it cannot use.",
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which is no tensor"
        + ("." if test_type is is_torch_tensor else f" and does not pass {name_of(test_type)}()."),
        "Give tensors, or lists, tuples, mappings and dataclasses of tensors; take other values out first.",
    )
