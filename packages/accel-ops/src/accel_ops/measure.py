"""What nested data are like: their batch size, device, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_ops.tree import (
    TensorInformation,
    children,
    is_tensor_information,
    recursively_apply,
)
from accel_state.errors import SettingError, UnknownKind

__all__ = (
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_torch_xpu_tensor",
    "listify",
)


def find_batch_size(data: Any) -> int:
    """Size of the first dimension of the first leaf.

    Raises:
        SettingError: a container on the way to the first leaf is empty.
        UnknownKind: the first leaf is no tensor, or a tensor without dimensions.
    """
    first = data
    while isinstance(first, (list, tuple, Mapping)):
        if not first:
            raise SettingError(
                "The batch size of nested data was asked for.",
                f"An empty {type(first).__name__} holds no tensor that would have one.",
                "Give data with a tensor in front.",
            )
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        what = "a tensor without dimensions" if isinstance(first, torch.Tensor) else f"of type {type(first).__name__}"
        raise UnknownKind(
            "The batch size of nested data was asked for.",
            f"The first leaf is {what}, and has no batch size.",
            "Give data whose first leaf is a tensor with a batch dimension.",
        )
    return first.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where there is no batch size to find."""
    try:
        return find_batch_size(data)
    except (SettingError, UnknownKind):
        return None


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor; None when there is none. What follows that tensor is not visited."""
    if isinstance(data, torch.Tensor):
        return data.device
    for item in children(data):
        device = find_device(item)
        if device is not None:
            return device
    return None


def get_shape(data: Any) -> Any:
    """Nested data with the shape of each tensor, as a list, in its place."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    """Nested data with a `TensorInformation` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Nested data with an uninitialised tensor on the CPU in place of each `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def listify(data: Any) -> Any:
    """Nested data with the numbers of each tensor, as nested lists, in its place."""
    return recursively_apply(_to_list, data)


def _to_list(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().tolist()


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether an object is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.is_xpu
