"""Which process owns which sharded matrix, and the exchange of shards between a matrix's owner and all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from accel_ops.dtensors import full_tensor, with_shard
from accel_state.errors import NotOffered

__all__ = ("OwnedMatrix", "from_owners", "is_sharded_matrix", "own_part", "rounds_of", "to_owners")

Box = tuple[int, int, int, int]
"""The part of a matrix that a process has: first row, end of the rows, first column, end of the columns."""

_NOTHING: Box = (0, 0, 0, 0)


@dataclass(eq=False)
class OwnedMatrix:
    """A sharded matrix, and who has which part of it; processes are numbered in its process group.

    Args:
        parameter: the sharded parameter.
        index: the index of its group of options in the optimizer.
        boxes: the part of each process.
        group: the process group of its mesh.
        owner: the process that steps it.
        whole: the parameter that the owner steps; it has data only during a step.
    """

    parameter: Any
    index: int
    boxes: list[Box]
    group: Any
    owner: int = 0
    whole: Parameter = field(default_factory=lambda: Parameter(torch.empty(0)))

    @property
    def is_mine(self) -> bool:
        """Whether this process owns it."""
        return dist.get_rank(self.group) == self.owner

    @cached_property
    def senders(self) -> dict[Box, int]:
        """For each part, the process that sends it to the owner: of several replicas the one nearest to the owner."""
        nearest = sorted(range(len(self.boxes)), key=lambda rank: abs(rank - self.owner), reverse=True)
        return {self.boxes[rank]: rank for rank in nearest if self.boxes[rank] != _NOTHING}

    @property
    def own_box(self) -> Box:
        """The part of this process."""
        return self.boxes[dist.get_rank(self.group)]


def is_sharded_matrix(parameter: Any) -> bool:
    """Whether a parameter is a matrix of which each process has only a part."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return False
    return any(not placement.is_replicate() for placement in parameter.placements)


def own_part(tensor: Any) -> Tensor:
    """This process's part of a DTensor; writing into it changes the tensor."""
    shard: Tensor = tensor.detach().to_local()
    return shard


def rounds_of(parameters: Sequence[tuple[int, Any]]) -> list[list[OwnedMatrix]]:
    """Choose an owner for each matrix, balanced by size; called on every process.

    Args:
        parameters: sharded matrices, each with the index of its group of options.

    Returns:
        Rounds of matrices of one mesh and dtype, in each of which a process owns at most one.

    Raises:
        NotOffered: the shard of a process is not one block of a matrix.
    """
    alike: dict[Any, list[tuple[int, Any]]] = {}
    for index, parameter in parameters:
        alike.setdefault((parameter.device_mesh, parameter.dtype), []).append((index, parameter))
    return [together for (mesh, _), own in alike.items() for together in _rounds_on(mesh, own)]


def _rounds_on(mesh: Any, parameters: Sequence[tuple[int, Any]]) -> list[list[OwnedMatrix]]:
    ranks = mesh.mesh.flatten().tolist()
    everyone = len(ranks) == dist.get_world_size()
    group = dist.group.WORLD if everyone else dist.new_group(ranks, use_local_synchronization=True)
    own = torch.tensor([_own_box(parameter) for _, parameter in parameters], device=mesh.device_type)
    everyones = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(everyones, own, group=group)
    by_matrix = torch.stack(everyones, 1).tolist()
    matrices = [
        OwnedMatrix(parameter, index, [tuple(box) for box in boxes], group)
        for (index, parameter), boxes in zip(parameters, by_matrix, strict=True)
    ]
    owned: list[list[OwnedMatrix]] = [[] for _ in ranks]
    loads = [0] * len(ranks)
    for matrix in sorted(matrices, key=lambda one: one.parameter.numel(), reverse=True):
        matrix.owner = loads.index(min(loads))
        loads[matrix.owner] += matrix.parameter.numel()
        owned[matrix.owner].append(matrix)
    return [[one for one in together if one is not None] for together in zip_longest(*owned)]


def _own_box(parameter: Any) -> Box:
    """The part of a matrix that this process has, as torch itself joins the parts; a collective."""
    mark, shard = dist.get_rank() + 1, own_part(parameter)
    marked = full_tensor(with_shard(parameter, torch.full_like(shard, mark, dtype=torch.int32))) == mark
    if not shard.numel():
        return _NOTHING
    rows, columns = (marked.any(dim).nonzero().flatten().tolist() for dim in (1, 0))
    box = (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1)
    if _size(box) != shard.numel():
        raise NotOffered(
            "Cannot step a matrix with WholeMatrices.",
            f"The part of a process is not one block of the matrix ({parameter.placements}).",
            "Step this parameter with another optimizer.",
        )
    return box


def _size(box: Box) -> int:
    return (box[1] - box[0]) * (box[3] - box[2])


def _part(whole: Tensor, box: Box) -> Tensor:
    return whole[box[0] : box[1], box[2] : box[3]]


def to_owners(matrices: Sequence[OwnedMatrix], shards: Sequence[Tensor]) -> Tensor | None:
    """Send shards to the owners of the matrices of one round; called on every process of their mesh.

    Args:
        matrices: a round.
        shards: this process's shard of each.

    Returns:
        The whole matrix that this process owns, or None if it owns none.
    """
    rank, device = dist.get_rank(matrices[0].group), matrices[0].parameter.device_mesh.device_type
    sends = {
        matrix.owner: shard
        for matrix, shard in zip(matrices, shards, strict=True)
        if matrix.senders.get(matrix.own_box) == rank
    }
    mine = next((matrix for matrix in matrices if matrix.is_mine), None)
    receives = {} if mine is None else {sender: _size(box) for box, sender in mine.senders.items()}
    parts = _exchange(matrices[0].group, shards[0].to(device), sends, receives)
    if mine is None:
        return None
    whole = shards[0].new_empty(mine.parameter.shape, device=device)
    for box, sender in mine.senders.items():
        target = _part(whole, box)
        target.copy_(parts[sender].view_as(target))
    return whole


def from_owners(matrices: Sequence[OwnedMatrix], whole: Tensor | None) -> list[Tensor]:
    """Send every process its shard of each matrix of a round; called on every process of their mesh.

    Args:
        matrices: a round.
        whole: the whole matrix that this process owns, or None.
    """
    mine = next((matrix for matrix in matrices if matrix.is_mine), None)
    sends, receives = dict[int, Tensor](), dict[int, int]()
    if mine is not None and whole is not None:
        sends = {receiver: _part(whole, box) for receiver, box in enumerate(mine.boxes) if box != _NOTHING}
    receives = {matrix.owner: _size(matrix.own_box) for matrix in matrices if matrix.own_box != _NOTHING}
    shards = [own_part(matrix.parameter) for matrix in matrices]
    like = shards[0].to(matrices[0].parameter.device_mesh.device_type)
    parts = _exchange(matrices[0].group, like, sends, receives)
    return [
        parts[matrix.owner].view(shard.shape) if shard.numel() else shard
        for matrix, shard in zip(matrices, shards, strict=True)
    ]


def _exchange(group: Any, like: Tensor, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> dict[int, Tensor]:
    """Send a tensor to each of some processes, and receive theirs, flat; a process keeps its own without a message.

    Args:
        group: the process group.
        like: has the dtype and device of all tensors.
        sends: by receiver.
        receives: the number of elements by sender.
    """
    own, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [0 if rank == own or rank not in sends else sends[rank].numel() for rank in range(size)]
    received = [0 if rank == own else receives.get(rank, 0) for rank in range(size)]
    flat = [like.new_empty(0), *(sends[rank].reshape(-1).to(like) for rank in range(size) if sent[rank])]
    arrived = like.new_empty(sum(received))
    dist.all_to_all_single(arrived, torch.cat(flat), received, sent, group=group)
    parts = dict(enumerate(torch.split(arrived, received)))
    if own in receives:
        parts[own] = sends[own].reshape(-1)
    return parts
