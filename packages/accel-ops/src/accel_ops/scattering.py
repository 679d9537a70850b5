"""scatter: each process gets its part of the data of one."""

from __future__ import annotations

from typing import Any

import torch

from accel_ops.exchange import CheckedCall
from accel_ops.packing import Packing
from accel_ops.pickling import dumps, loads
from accel_ops.plan import check_leaf, check_rank
from accel_ops.tree import (
    TensorInformation,
    flatten,
    is_tensor_information,
    leaves_with_paths,
    recursively_apply,
)
from accel_state import current
from accel_state.errors import SettingError

__all__ = ("scatter",)


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
        UnknownKind: a leaf is no tensor, or one that cannot travel.
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
        _check(path, leaf, count)
    return leaves


def _part_of(leaf: torch.Tensor, count: int) -> TensorInformation:
    return TensorInformation(torch.Size((leaf.shape[0] // count, *leaf.shape[1:])), leaf.dtype)


def _check(path: str, leaf: torch.Tensor, count: int) -> None:
    check_leaf(path, leaf, "scatter")
    if leaf.dim() == 0 or leaf.shape[0] % count:
        raise SettingError(
            f"scatter() was to split {path or 'a tensor'} of shape {tuple(leaf.shape)} between {count} processes.",
            "Its first dimension is not a multiple of that." if leaf.dim() else "It has no dimension to split.",
            "Pad it first, for example with pad_input_tensors().",
        )
