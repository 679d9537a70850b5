"""Bringing half-precision results back to float32, as autocasting forward passes leave them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch

from accel_ops.tree import recursively_apply
from accel_state.errors import AccelError

__all__ = ("CannotPickle", "ConvertOutputsToFp32", "convert_outputs_to_fp32", "convert_to_fp32")

_HALF: Final = frozenset({torch.float16, torch.bfloat16})


class CannotPickle(AccelError, pickle.PicklingError):
    """Met when an object is pickled that only makes sense in the process that made it."""


def convert_to_fp32(tensor: Any) -> Any:
    """Nested data with its float16 and bfloat16 tensors as float32; all other leaves stay as they are."""
    # Most outputs of models are one tensor, which needs no walk.
    if isinstance(tensor, torch.Tensor):
        return tensor.float() if tensor.dtype in _HALF else tensor
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


class ConvertOutputsToFp32:
    """A forward function whose half-precision results come back as float32.

    Args:
        model_forward: the function; also found as `__wrapped__`.

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
            "A model that was prepared for mixed precision was to be pickled.",
            "Its forward function belongs to this process.",
            "Pickle what `unwrap_model(model)` returns, or save its state dict.",
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `model_forward` and returns its half-precision results as float32.

    A plain function, so that it can take the place of a method. `__wrapped__` is a `ConvertOutputsToFp32`, which holds
    the original as `model_forward`.
    """
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward
