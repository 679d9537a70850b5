"""scatter and all_to_all: each process gets its part of the data of one, or of all."""

from __future__ import annotations

from typing import Any

import torch

from accel_ops.exchange import CheckedCall, check_alone
from accel_ops.packing import Packing
from accel_ops.pickling import dumps, loads
from accel_ops.plan import check_divisible, check_leaf, check_rank
from accel_ops.tree import (
    TensorInformation,
    flatten,
    is_tensor_information,
    leaves_with_paths,
    rebuild,
    recursively_apply,
)
from accel_state import current

__all__ = ("all_to_all", "scatter")


def scatter(tensor: Any = None, from_process: int = 0) -> Any:
    """The part of one process's tensors that is for this process: equal slices of the first dimension, by rank.

    The structure and the shapes travel along, so only `from_process` gives data. With one process they come back as
    they are.

    Args:
        tensor: on `from_process`, a tensor, or nested data with tensors alone at the leaves, each with a first
            dimension that the number of processes divides; ignored on the others.
        from_process: the process whose data are split.

    Raises:
        SettingError: there is no such process, or a tensor cannot be split evenly; its path is named.
        UnknownKind: a leaf is not a tensor, or a tensor that cannot be sent.
        ShapeMismatch: on the other processes, when `from_process` could not take part, or when the calls differ.
        CollectiveError: a process is gone or did not come in time.

    Example:
        >>> mine = scatter({"images": images} if state.is_main_process else None)
    """
    transport = current.process_or_start().transport
    if transport.world_size == 1:
        check_rank("scatter", "from_process", from_process, transport)
        _checked_leaves(tensor, 1)
        return tensor
    with CheckedCall(transport, "scatter", from_process=from_process) as call:
        check_rank("scatter", "from_process", from_process, transport)
        inputs = announcement = None
        if transport.rank == from_process:
            skeleton, inputs = _parts(tensor, transport.world_size, transport.device)
            announcement = dumps(skeleton)
        skeleton = loads(call.bytes_of(announcement, from_process))
        found = [info for _, info in leaves_with_paths(skeleton) if is_tensor_information(info)]
        packing = Packing((info.shape, info.dtype) for info in found)
        output = torch.empty(packing.nbytes, dtype=torch.uint8, device=transport.device)
        if packing.nbytes:
            call.wait([transport.scatter(output, inputs, from_process)])
        received = iter(packing.split(output))
    return recursively_apply(lambda info: next(received), skeleton, test_type=is_tensor_information)


def all_to_all(tensor: Any) -> Any:
    """What all processes have for this process, joined along the first dimension in the order of the ranks.

    Each process splits its tensors into equal slices of their first dimension, and slice r is for process r. Shapes
    stay as they are; with one process the data come back.

    Args:
        tensor: a tensor, or nested data with tensors alone at the leaves, each with a first dimension that the number
            of processes divides; shapes and dtypes equal on all processes.

    Raises:
        SettingError: a tensor cannot be split evenly; its path is named.
        UnknownKind: a leaf is not a tensor, or a tensor that cannot be sent.
        ShapeMismatch: on every process, when their calls, structures, shapes or dtypes differ.
        CollectiveError: a process is gone or did not come in time.

    Example:
        >>> from_everyone = all_to_all(for_everyone)
    """
    transport = current.process_or_start().transport
    count = transport.world_size

    def check(path: str, leaf: torch.Tensor, operation: str) -> None:
        check_leaf(path, leaf, operation)
        check_divisible(path, leaf, operation, count)

    if count == 1:
        check_alone("all_to_all", tensor, check)
        return tensor
    with CheckedCall(transport, "all_to_all") as call:
        plan, leaves = call.plan(tensor, check=check)
        rows = [_rows(leaves[position], count) for position in plan.order]
        packing = Packing(((row.shape[1:], row.dtype) for row in rows), count)
        given = torch.empty(count, packing.nbytes, dtype=torch.uint8, device=transport.device)
        for rank, buffer in enumerate(given):
            packing.write([row[rank] for row in rows], buffer)
        received = torch.empty_like(given)
        call.agree(plan)
        if packing.nbytes:
            call.wait([transport.all_to_all(received, given)])
        results: list[Any] = [None] * len(leaves)
        for position, joined in zip(plan.order, packing.join(received), strict=True):
            results[position] = joined.to(plan.devices[position]) if plan.devices else joined
        return rebuild(tensor, iter(results))


def _rows(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor cut along its first dimension, one row for each process."""
    return leaf.detach().reshape(count, leaf.shape[0] // count, *leaf.shape[1:])


def _parts(tensor: Any, count: int, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """What each part looks like, as nested data, and the packed parts."""
    leaves = _checked_leaves(tensor, count)
    skeleton = recursively_apply(lambda leaf: _part_of(leaf, count), tensor)
    chunks = [leaf.to(device).chunk(count) if leaf.numel() else (leaf,) * count for leaf in leaves]
    packing = Packing((chunk[0].shape, chunk[0].dtype) for chunk in chunks)
    packed = [torch.empty(packing.nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    for rank, buffer in enumerate(packed):
        packing.write([chunk[rank] for chunk in chunks], buffer)
    return skeleton, packed


def _checked_leaves(tensor: Any, count: int) -> list[torch.Tensor]:
    leaves, _ = flatten(tensor, "scatter")
    for path, leaf in leaves_with_paths(tensor):
        check_leaf(path, leaf, "scatter")
        check_divisible(path, leaf, "scatter", count)
    return leaves


def _part_of(leaf: torch.Tensor, count: int) -> TensorInformation:
    return TensorInformation(torch.Size((leaf.shape[0] // count, *leaf.shape[1:])), leaf.dtype)
