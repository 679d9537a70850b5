"""Distributed tensors (DTensor): in every collective here one counts as the whole tensor that it stands for."""

from __future__ import annotations

import sys
from typing import Any

import torch

from accel_state.errors import UnknownKind

__all__ = ("check_writable", "is_dtensor", "placement_of", "whole", "write_whole")


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. Nothing is imported: where its module was not loaded, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def placement_of(tensor: Any) -> str:
    """How a DTensor is spread, as text that is equal on all its processes."""
    return f"DTensor {tuple(tensor.shape)} {tensor.placements} on {tuple(tensor.device_mesh.shape)}"


def whole(tensor: Any) -> torch.Tensor:
    """The tensor that a DTensor stands for; a collective among the processes of its mesh."""
    full: torch.Tensor = tensor.full_tensor()
    return full


def check_writable(tensor: Any) -> None:
    """Let a DTensor pass whose processes each hold a part of its value.

    Raises:
        UnknownKind: they hold partial sums, so that no part of a value is theirs.
    """
    from torch.distributed.tensor import Partial

    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise UnknownKind(
            "A DTensor was to be overwritten with a value.",
            f"Its placements are {tensor.placements}: each process holds a partial sum.",
            "Redistribute it to Shard or Replicate first.",
        )


def write_whole(tensor: Any, value: torch.Tensor) -> None:
    """Overwrite the local part of a DTensor, one that is writable, with its part of `value`."""
    from torch.distributed.tensor import distribute_tensor

    parts = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(parts.to_local())
