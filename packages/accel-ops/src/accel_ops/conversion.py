"""Moves nested data to a device, and converts half-precision results to float32."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NoReturn

import torch

from accel_ops.tree import map_children, mapping_like, recursively_apply
from accel_state.errors import AccelError

__all__ = (
    "CannotPickle",
    "ConvertOutputsToFp32",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "send_to_device",
)

_ATOM_TYPES: Final = frozenset({str, bytes, int, float, bool, complex, type(None)})


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Collection[str] | None = None
) -> Any:
    """Move the tensors in nested data, and all other objects with a method `.to`, to `device`.

    Tensors that are already on it are not copied. Objects that cannot be moved are returned unchanged.

    Args:
        tensor: a tensor, an object with `.to`, or nested data.
        device: a `torch.device`, its name, or the index of a device.
        non_blocking: do not wait until copies from pinned memory are done.
        skip_keys: keys of mappings, at every depth; their values are not moved.

    Example:
        >>> batch = send_to_device({"pixels": torch.zeros(2, 3), "names": ["a", "b"]}, "cpu")
    """
    target = device if isinstance(device, torch.device) else torch.device(device)
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _sent(tensor, target, non_blocking, skipped)


def _sent(value: Any, target: torch.device, non_blocking: bool, skipped: tuple[str, ...]) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        return value if value.device == target else value.to(target, non_blocking=non_blocking)
    if kind is dict and not skipped:
        return {key: _sent(item, target, non_blocking, skipped) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([_sent(item, target, non_blocking, skipped) for item in value])
    if kind in _ATOM_TYPES:
        return value
    if hasattr(value, "to"):
        return _move(value, target, non_blocking)
    if skipped and isinstance(value, Mapping):
        moved = {
            key: item if key in skipped else _sent(item, target, non_blocking, skipped) for key, item in value.items()
        }
        return mapping_like(value, moved)
    return map_children(value, lambda item: _sent(item, target, non_blocking, skipped))


def _move(value: Any, device: torch.device, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError as error:
        if "non_blocking" not in str(error):
            raise
        return value.to(device)


class CannotPickle(AccelError, pickle.PicklingError):
    """Raised when an object is pickled that is valid only in the process that created it."""


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the float16 and bfloat16 tensors in nested data to float32; all other leaves are unchanged.

    Example:
        >>> convert_to_fp32({"logits": torch.ones(2, dtype=torch.float16), "names": ["a"]})
        {'logits': tensor([1., 1.]), 'names': ['a']}
    """
    # Most outputs of models are one tensor, which needs no walk.
    if isinstance(tensor, torch.Tensor):
        dtype = tensor.dtype
        return tensor.float() if dtype is torch.float16 or dtype is torch.bfloat16 else tensor
    return recursively_apply(convert_to_fp32, tensor)


class ConvertOutputsToFp32:
    """Wraps a forward function and converts its half-precision results to float32.

    Args:
        model_forward: the function; also available as `__wrapped__`.

    Raises:
        CannotPickle: when pickled, because the function belongs to a prepared model.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise CannotPickle(
            "Cannot pickle a model that was prepared for mixed precision.",
            "Its forward function belongs to this process.",
            "Pickle what `unwrap_model(model)` returns, or save its state dict.",
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `model_forward` and returns its half-precision results as float32.

    It is a plain function, so that it can replace a method. Its `__wrapped__` is a `ConvertOutputsToFp32`, which has
    the original as `model_forward`.
    """
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward
