"""DTensors: which part of the full tensor a process holds, and shards in host memory while groups move device tensors.

A shard may consist of several parts of the full tensor: of weights that are packed into one matrix, such as gate and up
projections, each process holds a slice of each. torch places such a dimension by `_StridedShard`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

__all__ = ("LocalChunk", "full_tensor", "local_chunks", "with_shard", "write_full_tensor")


class LocalChunk(NamedTuple):
    """A part of a full tensor that is contiguous in each dimension, and the memory in which this process holds it.

    Attributes:
        offsets: first index in the full tensor, for each dimension.
        local: a view of the process's shard.
    """

    offsets: tuple[int, ...]
    local: torch.Tensor

    @property
    def place(self) -> tuple[slice, ...]:
        """The indexes in the full tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.local.shape, strict=True))


def local_chunks(tensor: Any) -> list[LocalChunk]:
    """The parts of a DTensor that this process holds; needs no communication.

    Args:
        tensor: a DTensor.

    Returns:
        The parts, in the order of the full tensor: an empty one for an empty shard, none on a process outside the mesh.

    Raises:
        ValueError: the shard is a partial sum, or does not have the shape of its placement.

    Example:
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> weight = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])  # on process 1 of 2
        >>> [chunk.offsets for chunk in local_chunks(weight)]
        [(3, 0)]
    """
    if tensor.device_mesh.get_coordinate() is None:
        return []
    local = tensor.to_local().detach()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"A tensor with the placement {tensor.placements} is a sum, of which no process holds a part")
    runs = [_runs(indexes) for indexes in _indexes(tensor)]
    if tuple(local.shape) != tuple(sum(length for _, _, length in dimension) for dimension in runs):
        raise ValueError(
            f"A shard of a tensor of shape {tuple(tensor.shape)} has shape {tuple(local.shape)}, which does not agree "
            f"with its placement {tensor.placements} on a mesh of shape {tuple(tensor.device_mesh.shape)}"
        )
    return [
        LocalChunk(
            tuple(begin for begin, _, _ in box), local[tuple(slice(start, start + length) for _, start, length in box)]
        )
        for box in itertools.product(*runs)
    ]


def _indexes(tensor: Any) -> list[torch.Tensor]:
    """For each dimension, the indexes of the full tensor that this process holds."""
    mesh, held = tensor.device_mesh, [torch.arange(size) for size in tensor.shape]
    coordinate = mesh.get_coordinate()
    sharding = [(axis, one) for axis, one in enumerate(tensor.placements) if hasattr(one, "dim")]
    for dimension in range(len(held)):
        mine = [(axis, getattr(one, "split_factor", 1)) for axis, one in sharding if one.dim == dimension]
        for position, (axis, factor) in enumerate(mine):
            later = [other for other, _ in mine[position + 1 :]]
            if factor > 1 and factor == math.prod(mesh.size(other) for other in later):
                # The later axes sharded the dimension first: fully_shard shards what tensor parallelism left.
                mine[position:] = [*mine[position + 1 :], (axis, 1)]
                break
        for axis, factor in mine:
            blocks = (block.chunk(mesh.size(axis)) for block in held[dimension].chunk(factor))
            held[dimension] = torch.cat([_part(block, coordinate[axis]) for block in blocks])
    return held


def _part(chunks: tuple[torch.Tensor, ...], position: int) -> torch.Tensor:
    """One of the chunks of `torch.chunk`, which returns fewer if there are not enough elements."""
    return chunks[position] if position < len(chunks) else chunks[0][:0]


def _runs(indexes: torch.Tensor) -> list[tuple[int, int, int]]:
    """First index, position and length of each run of consecutive indexes."""
    if not len(indexes):
        return [(0, 0, 0)]
    breaks = (indexes.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(indexes)]
    return [(int(indexes[start]), start, end - start) for start, end in zip(starts, ends, strict=True)]


def write_full_tensor(tensor: Any, value: torch.Tensor) -> None:
    """Overwrite this process's shard of a DTensor by its part of the full tensor `value`; needs no communication."""
    with torch.no_grad():
        for chunk in local_chunks(tensor):
            chunk.local.copy_(value[chunk.place])


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
