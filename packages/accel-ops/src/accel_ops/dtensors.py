"""DTensors: which part of the full tensor a process holds, and shards in host memory while groups move device tensors.

A shard may consist of several parts of the full tensor: of weights that are packed into one matrix, such as gate and up
projections, each process holds a slice of each. torch places such a dimension by `_StridedShard`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
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
    runs = _runs(tensor)
    if tuple(local.shape) != tuple(map(_length, runs)):
        raise ValueError(
            f"A shard of a tensor of shape {tuple(tensor.shape)} has shape {tuple(local.shape)}, which does not agree "
            f"with its placement {tensor.placements} on a mesh of shape {tuple(tensor.device_mesh.shape)}"
        )
    return [
        LocalChunk(
            tuple(run.first for _, run in box), local[tuple(slice(start, start + run.length) for start, run in box)]
        )
        for box in itertools.product(*map(_placed, runs))
    ]


class _Run(NamedTuple):
    """Consecutive indexes of a dimension of a full tensor."""

    first: int
    length: int


def _runs(tensor: Any) -> list[list[_Run]]:
    """For each dimension, the indexes of the full tensor that this process holds.

    They are numbers, not tensors, which have no values in a plan (`FakeTensorMode`).
    """
    mesh, held = tensor.device_mesh, [[_Run(0, size)] for size in tensor.shape]
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
            blocks = [_chunk(held[dimension], factor, number) for number in range(factor)]
            held[dimension] = _joined(
                run for block in blocks for run in _chunk(block, mesh.size(axis), coordinate[axis])
            )
    return held


def _chunk(runs: Sequence[_Run], chunks: int, number: int) -> list[_Run]:
    """One of the chunks that `torch.chunk` makes of some indexes; an empty one if there are not enough of them."""
    size = -(-_length(runs) // chunks)
    spans = (
        (run.first - start, max(start, number * size), min(start + run.length, (number + 1) * size))
        for start, run in _placed(runs)
    )
    return [_Run(shift + begin, end - begin) for shift, begin, end in spans if begin < end]


def _joined(runs: Iterable[_Run]) -> list[_Run]:
    """The same indexes with those in one run that follow each other; an empty run for none."""
    joined = list[_Run]()
    for run in runs:
        if joined and run.first == sum(joined[-1]):
            run = _Run(joined[-1].first, joined.pop().length + run.length)
        joined.append(run)
    return joined or [_Run(0, 0)]


def _length(runs: Iterable[_Run]) -> int:
    return sum(run.length for run in runs)


def _placed(runs: Sequence[_Run]) -> Iterator[tuple[int, _Run]]:
    """Each run with the position of its first index in the shard."""
    return zip(itertools.accumulate((run.length for run in runs), initial=0), runs, strict=False)


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
