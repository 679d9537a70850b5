"""DTensors whose shards are in host memory, while the groups of their mesh move tensors of the device only."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ("full_tensor", "with_shard")


def full_tensor(tensor: Any) -> torch.Tensor:
    """The full tensor of a DTensor, gathered on the device of its mesh; a collective."""
    kind = tensor.device_mesh.device_type
    gathered: torch.Tensor = (tensor if tensor.device.type == kind else tensor.to(kind)).full_tensor()
    return gathered


def with_shard(tensor: Any, shard: torch.Tensor) -> Any:
    """A DTensor of another shard with the placement of `tensor`; the shard stays where it is.

    `DTensor.from_local` would move it to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        placed: DTensor = torch.empty_like(tensor, dtype=shard.dtype, device="meta")  # type: ignore[assignment]
        constructed: Any = DTensor
        return constructed(shard, placed._spec, requires_grad=False)
