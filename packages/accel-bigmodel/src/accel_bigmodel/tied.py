"""Tensors that are one tensor under several names: finding them, and tying them again after weights were replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ("id_tensor_storage", "memory_of", "tied_names")


def id_tensor_storage(tensor: Tensor) -> tuple[Any, int, int]:
    """Device, address and size in bytes of the storage under a tensor: equal for all views of one storage.

    Tensors without an address of their own (meta, empty, subclasses that hide it) are identified by the object.
    """
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        address, size = 0, 0
    return tensor.device, address or id(tensor), size


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two names have in common when they mean the same tensor: storage, offset, shape, strides and dtype."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    return (*id_tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def tied_names(state_dict: Mapping[str, Any]) -> list[list[str]]:
    """Groups of two or more names under which a state dict holds the same tensor, in the order of the state dict.

    Takes time linear in the number of names. Views of different parts of one storage are not tied.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor):
            groups.setdefault(memory_of(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
