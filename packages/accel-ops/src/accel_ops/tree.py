"""Nested data: lists, tuples, named tuples, mappings and dataclasses with tensors at their leaves.

Everything in this package that takes "a tensor or nested data" walks it with the functions here, so that all operations
agree on what a container is, how it is rebuilt, and how the path to a leaf is written. Functions that read facts from
nested data, such as `find_batch_size` and `get_shape`, are here too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeGuard, TypeVar

import torch

from accel_state.errors import SettingError, UnknownKind

__all__ = (
    "TensorInformation",
    "TreeSpec",
    "children",
    "find_batch_size",
    "find_device",
    "flatten",
    "function_name",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "leaves_with_paths",
    "listify",
    "map_children",
    "mapping_like",
    "rebuild",
    "recursively_apply",
)

T = TypeVar("T")

TreeSpec = Any
"""Hashable description of the containers around the leaves: equal for data that differ only in the leaves."""


@dataclasses.dataclass
class TensorInformation:
    """Shape and dtype of a tensor, without its contents."""

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
    """A sequence of the same type as another, which may be a named tuple.

    Args:
        obj: a sequence of the type of the result.
        generator: the values of the result; for a named tuple, as many as it has fields.

    Example:
        >>> honor_type((1, 2), (2 * value for value in (1, 2)))
        (2, 4)
    """
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
    """Replace each leaf that passes `test_type` by `func(leaf, *args, **kwargs)`, in containers of the same types.

    Args:
        func: called with the leaf, `args` and `kwargs`.
        data: a leaf, or nested lists, tuples, named tuples and mappings of leaves.
        test_type: whether a value is a leaf to call `func` with; by default, whether it is a tensor.
        error_on_other_type: raise for other leaves; by default they are unchanged.

    Raises:
        UnknownKind: a leaf does not pass and `error_on_other_type` is set; the error names its path.

    Example:
        >>> recursively_apply(lambda tensor: tensor.shape[0], {"a": torch.zeros(3, 2), "b": "text"})
        {'a': 3, 'b': 'text'}
    """

    def refuse(value: Any) -> None:
        if error_on_other_type:
            raise _unsupported(data, value, test_type, function_name(func))

    apply = func if not (args or kwargs) else _with_arguments(func, args, kwargs)
    # Most leaves have this type: comparing it first avoids a call of test_type for each.
    usual = torch.Tensor if test_type is is_torch_tensor else None
    return _applied(data, apply, test_type, usual, refuse)


def _applied(
    value: Any,
    apply: Callable[[Any], Any],
    test_type: Callable[[Any], bool],
    usual: type | None,
    refuse: Callable[[Any], None],
) -> Any:
    # Not a nested function, which would be in a reference cycle with itself: tensors that it refers to would stay in
    # memory until the garbage collector runs. The same holds for the other recursive functions of this library.
    kind = type(value)
    if kind is dict:
        return {
            key: apply(item) if type(item) is usual else _applied(item, apply, test_type, usual, refuse)
            for key, item in value.items()
        }
    if kind is list or kind is tuple:
        return kind(
            [apply(item) if type(item) is usual else _applied(item, apply, test_type, usual, refuse) for item in value]
        )
    if test_type(value):
        return apply(value)
    return map_children(value, lambda item: _applied(item, apply, test_type, usual, refuse), refuse)


def _with_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda leaf: func(leaf, *args, **kwargs)


def rebuild(data: Any, leaves: Iterator[Any]) -> Any:
    """Replace the leaves of `data`, in the order of `flatten`, by those of `leaves`; other values are unchanged."""
    return _rebuilt(data, leaves.__next__)


def _rebuilt(value: Any, following: Callable[[], Any]) -> Any:
    kind, usual = type(value), torch.Tensor
    if kind is dict:
        return {key: following() if type(item) is usual else _rebuilt(item, following) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([following() if type(item) is usual else _rebuilt(item, following) for item in value])
    if isinstance(value, torch.Tensor):
        return following()
    return map_children(value, lambda item: _rebuilt(item, following))


def flatten(data: Any, operation: str) -> tuple[list[torch.Tensor], TreeSpec]:
    """The tensors of `data`, and a hashable description of the containers around them.

    Raises:
        UnknownKind: a leaf is not a tensor; the error names its path and `operation`.
    """

    def refuse(value: Any) -> NoReturn:
        raise _unsupported(data, value, is_torch_tensor, operation)

    leaves: list[torch.Tensor] = []
    return leaves, _flattened(data, leaves.append, refuse)


def _flattened(value: Any, leaf: Callable[[torch.Tensor], TreeSpec], refuse: Callable[[Any], NoReturn]) -> TreeSpec:
    # `leaf` returns None, which represents a leaf in the structure.
    kind, usual = type(value), torch.Tensor
    if kind is dict:
        parts = [leaf(item) if type(item) is usual else _flattened(item, leaf, refuse) for item in value.values()]
        return dict, tuple(value), tuple(parts)
    if kind is list or kind is tuple:
        return kind, tuple([leaf(item) if type(item) is usual else _flattened(item, leaf, refuse) for item in value])
    if isinstance(value, torch.Tensor):
        return leaf(value)
    named = _children(value)
    if named is None:
        refuse(value)
    return kind, tuple([name for name, _ in named]), tuple([_flattened(item, leaf, refuse) for _, item in named])


def map_children(value: Any, walk: Callable[[Any], Any], refuse: Callable[[Any], None] | None = None) -> Any:
    """Apply `walk` to the items of a container of any type; other values are unchanged, after a call of `refuse`."""
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
    """The items of a container of any type; none for a value that is not a container."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (dict, Mapping)):  # the check for a dict is faster than that for a mapping
        return value.values()
    if _is_dataclass(value) and not isinstance(value, TensorInformation):
        return (getattr(value, field.name) for field in dataclasses.fields(value))
    return ()


def mapping_like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `original` with the items `items`."""
    make: Any = type(original)
    if hasattr(original, "default_factory"):
        again: Any = copy.copy(original)
        again.update(items)
        return again
    return make(items)


def leaves_with_paths(data: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf with its path, such as `['image'][0].mask`; the path is empty when `data` is a leaf itself."""
    yield from _with_paths("", data)


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of an object without one; for messages."""
    return getattr(function, "__name__", None) or type(function).__name__


def _with_paths(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    named = None if isinstance(value, (torch.Tensor, TensorInformation)) else _children(value)
    if named is None:
        yield path, value
        return
    for name, item in named:
        yield from _with_paths(path + name, item)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Names, as in a path, and values of the items of a container; None for other values."""
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
    """The object itself if no field changed, so that a configuration inside a batch keeps its identity."""
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
    """Whether a rebuilt container has the same objects as the original."""
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
        f"Cannot use the nested data given to {operation}().",
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which is not a tensor"
        + ("." if test_type is is_torch_tensor else f" and does not pass {function_name(test_type)}()."),
        "Pass tensors, or lists, tuples, mappings and dataclasses of tensors. Remove other values first.",
    )


def find_batch_size(data: Any) -> int:
    """Size of the first dimension of the first leaf.

    Raises:
        SettingError: a container on the way to the first leaf is empty.
        UnknownKind: the first leaf is not a tensor, or is a tensor without dimensions.
    """
    first = data
    while isinstance(first, (list, tuple, Mapping)):
        if not first:
            raise SettingError(
                "Cannot find the batch size of nested data.",
                f"An empty {type(first).__name__} contains no tensor.",
                "Pass data whose first leaf is a tensor.",
            )
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        what = "a tensor without dimensions" if isinstance(first, torch.Tensor) else f"of type {type(first).__name__}"
        raise UnknownKind(
            "Cannot find the batch size of nested data.",
            f"The first leaf is {what}, and has no batch size.",
            "Pass data whose first leaf is a tensor with a batch dimension.",
        )
    return first.shape[0]


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor; None if there is none. Values after that tensor are not visited.

    Example:
        >>> find_device({"names": ["a"], "images": torch.zeros(2)})
        device(type='cpu')
    """
    first, usual = data, torch.Tensor
    while True:
        kind = type(first)
        if kind is usual:
            return first.device  # type: ignore[no-any-return]
        # In most data the first item of each container leads to a tensor.
        if kind is dict and first:
            first = next(iter(first.values()))
        elif (kind is list or kind is tuple) and first:
            first = first[0]
        else:
            return _device_in(data)


def _device_in(data: Any) -> torch.device | None:
    if isinstance(data, torch.Tensor):
        return data.device
    for item in children(data):
        device = _device_in(item)
        if device is not None:
            return device
    return None


def get_shape(data: Any) -> Any:
    """Nested data with each tensor replaced by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    """Nested data with each tensor replaced by a `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Nested data with each `TensorInformation` replaced by an uninitialised tensor on the CPU."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def listify(data: Any) -> Any:
    """Nested data with each tensor replaced by its numbers, as nested lists."""
    return recursively_apply(_to_list, data)


def _to_list(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().tolist()
