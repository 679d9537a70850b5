"""gather, broadcast, scatter and all_to_all of nested data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from accel_ops.checked_call import (
    CheckedCall,
    check_alone,
    check_divisible,
    check_leaf,
    check_writable,
    index_of,
    is_dtensor,
    transport_of,
)
from accel_ops.dtensors import write_full_tensor
from accel_ops.groups import Group
from accel_ops.objects import dumps, loads
from accel_ops.packing import PackedLayout, as_bytes, gathered_shape
from accel_ops.reduction import reduce_scatter
from accel_ops.tree import (
    TensorInformation,
    flatten,
    is_tensor_information,
    leaves_with_paths,
    rebuild,
    recursively_apply,
)
from accel_state import current
from accel_state.errors import SettingError
from accel_state.protocol.call import PendingCall, start_all_gather_bytes
from accel_state.transport.base import Transport, Work

__all__ = (
    "PendingCall",
    "all_to_all",
    "async_all_gather_bytes",
    "broadcast",
    "gather",
    "scatter",
)


def gather(tensor: Any, dst: int | None = None, *, differentiable: bool = False, group: Group = None) -> Any:
    """Gather the tensors of all processes, concatenated along the first dimension in the order of the ranks.

    Tensors without dimensions are returned with one element per process. With one process the data are returned
    unchanged. A DTensor counts as the full tensor that it represents.

    Args:
        tensor: a tensor, or nested data with only tensors as leaves; shapes and dtypes equal on all processes.
        dst: rank in the run of the only process that gets the result; the others return None. By default all get it.
        differentiable: let gradients flow back: the gradient of a process's tensors is the sum of the gradients that
            all processes have for them. Every process must then run the backward pass, and `dst` is not possible.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: `dst` is not a rank of the group or is passed with `differentiable`, or this process is not in
            the group.
        UnknownKind: a leaf is not a tensor, or is a tensor that cannot be sent; the error names its path.
        ShapeMismatch: on every process, when their calls, structures, shapes or dtypes differ.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> predictions, labels = gather((predictions, labels))
    """
    if differentiable:
        return _gather_with_gradients(tensor, dst, group)
    transport = transport_of(group, "gather")
    if transport.world_size == 1:
        if dst is not None:
            index_of("gather", "dst", dst, transport)
        check_alone("gather", tensor)
        return tensor
    with CheckedCall(transport, "gather", dst=dst) as call:
        to = None if dst is None else index_of("gather", "dst", dst, transport)
        plan, leaves = call.plan(tensor)

        def prepare(leaf: torch.Tensor) -> tuple[Callable[[], Work], torch.Tensor | None]:
            return _collection(transport, leaf, gathered_shape(leaf.shape, transport.world_size), to)

        def prepare_packed(packed: torch.Tensor) -> tuple[Callable[[], Work], Sequence[torch.Tensor]]:
            start, rows = _collection(transport, packed, (transport.world_size, packed.numel()), to)
            return start, () if rows is None else plan.layout.parts(rows)

        parts, large = call.exchange(plan, leaves, prepare, prepare_packed)
        if to not in (None, transport.rank):
            return None
        gathered = plan.in_order(plan.layout.join(parts), [leaf for leaf in large if leaf is not None])
        return rebuild(tensor, plan.on_devices(gathered))


def broadcast(tensor: Any, src: int | None = None, *, group: Group = None) -> Any:
    """Send the tensors of one process to all processes.

    The tensors are overwritten in place and returned.

    Args:
        tensor: a tensor, or nested data with only tensors as leaves; shapes and dtypes equal on all processes.
        src: rank in the run of the sending process; by default the first of the group, or rank 0 without a group.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: `src` is not a rank of the group, or this process is not in the group.
        UnknownKind: a leaf is not a tensor, or is a tensor that cannot be sent; the error names its path.
        ShapeMismatch: on every process, when their calls, structures, shapes or dtypes differ.
        CollectiveError: a process ended or did not call this in time.
    """
    transport = transport_of(group, "broadcast")
    src = transport.rank_in_run(0) if src is None else src
    if transport.world_size == 1:
        index_of("broadcast", "src", src, transport)
        check_alone("broadcast", tensor)
        return tensor
    with CheckedCall(transport, "broadcast", src=src) as call:
        origin = index_of("broadcast", "src", src, transport)
        targets, spec = flatten(tensor, "broadcast")
        for target in targets:
            if type(target) is not torch.Tensor and is_dtensor(target):
                check_writable(target)
        plan, leaves = call.plan_of(tensor, targets, spec)
        sends = transport.rank == origin

        def prepare(buffer: torch.Tensor) -> tuple[Callable[[], Work], torch.Tensor]:
            return partial(transport.broadcast, as_bytes(buffer), origin), buffer

        packed, large = call.exchange(plan, leaves, prepare, prepare, sends=sends)
        if not sends:
            small = (
                plan.layout.split(plan.layout.parts(packed), copy=False)
                if isinstance(packed, torch.Tensor)
                else call.small_leaves(plan, origin)
            )
            pairs = list(zip([targets[position] for position in plan.small], small, strict=True))
            in_place = zip([targets[position] for position in plan.large], large, strict=True)
            _overwrite([*pairs, *(pair for pair in in_place if not _is_same_memory(*pair))])
        return tensor


def scatter(tensor: Any = None, src: int | None = None, *, group: Group = None) -> Any:
    """Split the tensors of one process along the first dimension into equal slices, and send slice r to process r.

    The call also sends the structure and the shapes, so only `src` passes data. With one process the data are returned
    unchanged.

    Args:
        tensor: on `src`, a tensor, or nested data with only tensors as leaves, each with a first dimension that is a
            multiple of the number of processes; ignored on the others.
        src: rank in the run of the sending process; by default the first of the group, or rank 0 without a group.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: `src` is not a rank of the group, this process is not in the group, or a tensor cannot be split
            evenly; the error names its path.
        UnknownKind: a leaf is not a tensor, or is a tensor that cannot be sent.
        ShapeMismatch: on the other processes, when `src` could not take part, or when the calls differ.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> mine = scatter({"images": images} if state.is_main_process else None)
    """
    transport = transport_of(group, "scatter")
    src = transport.rank_in_run(0) if src is None else src
    if transport.world_size == 1:
        index_of("scatter", "src", src, transport)
        _checked_leaves(tensor, 1)
        return tensor
    with CheckedCall(transport, "scatter", src=src) as call:
        origin = index_of("scatter", "src", src, transport)
        inputs = announcement = None
        if transport.rank == origin:
            skeleton, inputs = _parts(tensor, transport.world_size, transport.device)
            announcement = dumps(skeleton)
        skeleton = loads(call.broadcast_bytes(announcement, origin, moves=True))
        leaves = [info for _, info in leaves_with_paths(skeleton) if is_tensor_information(info)]
        layout = PackedLayout((info.shape, info.dtype) for info in leaves)
        output = torch.empty(layout.nbytes, dtype=torch.uint8, device=transport.device)
        if layout.nbytes:
            call.wait([transport.scatter(output, inputs, origin)])
        received = iter(layout.split(layout.parts(output)))
    return recursively_apply(lambda info: next(received), skeleton, test_type=is_tensor_information)


def all_to_all(tensor: Any, *, group: Group = None) -> Any:
    """Send a slice of each tensor to every process, and receive one from each, concatenated in the order of the ranks.

    Each process splits its tensors along the first dimension into equal slices, and slice r is for process r. Shapes do
    not change. With one process the data are returned unchanged.

    Args:
        tensor: a tensor, or nested data with only tensors as leaves, each with a first dimension that is
            a multiple of the number of processes; shapes and dtypes equal on all processes.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: this process is not in the group, or a tensor cannot be split evenly; the error names its path.
        UnknownKind: a leaf is not a tensor, or is a tensor that cannot be sent.
        ShapeMismatch: on every process, when their calls, structures, shapes or dtypes differ.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> from_everyone = all_to_all(for_everyone)
    """
    transport = transport_of(group, "all_to_all")
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
        layout = PackedLayout(((row.shape[1:], row.dtype) for row in rows), count)
        sent = torch.empty(count, layout.nbytes, dtype=torch.uint8, device=transport.device)
        for rank, buffer in enumerate(sent):
            layout.write([row[rank] for row in rows], layout.parts(buffer))
        received = torch.empty_like(sent)
        call.agree(plan, moves=bool(layout.nbytes))
        if layout.nbytes:
            call.wait([transport.all_to_all(received, sent)])
        results: list[Any] = [None] * len(leaves)
        for position, joined in zip(plan.order, layout.join(layout.parts(received)), strict=True):
            results[position] = joined.to(plan.devices[position]) if plan.devices else joined
        return rebuild(tensor, iter(results))


def _gather_with_gradients(tensor: Any, dst: int | None, group: Group) -> Any:
    if dst is not None:
        raise SettingError(
            f"Cannot gather with differentiable=True and dst={dst}.",
            "Gradients must flow back from every process, so every process needs the result.",
            "Omit one of the two.",
        )
    if transport_of(group, "gather").world_size == 1:
        return gather(tensor, group=group)
    leaves, _ = flatten(tensor, "gather")
    return rebuild(tensor, iter(_Gather.apply(tensor, group, *leaves)))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """gather() with gradients; every process may use each gathered leaf in its loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, group: Group, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered, _ = flatten(gather(tensor, group=group), "gather")
        ctx.group = group
        ctx.shapes = [leaf.shape for leaf in leaves]
        ctx.flows = [leaf.is_floating_point() or leaf.is_complex() for leaf in leaves]
        ctx.mark_non_differentiable(*(new for new, flows in zip(gathered, ctx.flows, strict=True) if not flows))
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        flowing = [gradient for gradient, flows in zip(gradients, ctx.flows, strict=True) if flows]
        parts = iter(reduce_scatter(flowing, group=ctx.group))
        own = zip(ctx.shapes, ctx.flows, strict=True)
        return None, None, *(next(parts).view(shape) if flows else None for shape, flows in own)


def _collection(
    transport: Transport, tensor: torch.Tensor, shape: Sequence[int], dst: int | None
) -> tuple[Callable[[], Work], torch.Tensor | None]:
    """The start of gathering `tensor` of every process into a new tensor of this shape, on all processes or on one."""
    if dst not in (None, transport.rank):
        return partial(transport.gather, None, as_bytes(tensor), dst), None
    gathered = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    rows = as_bytes(gathered)
    if dst is None:
        return partial(transport.all_gather, rows, as_bytes(tensor)), gathered
    return partial(transport.gather, list(rows.view(transport.world_size, -1)), as_bytes(tensor), dst), gathered


def _overwrite(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the received tensors, if there are any, into the caller's tensors."""
    into, new = [], []
    for target, value in pairs:
        if type(target) is not torch.Tensor and is_dtensor(target):
            write_full_tensor(target, value)
        else:
            into.append(target)
            new.append(value)
    # Tensors that were created in inference mode can be written to only in that mode; it does not affect others.
    with torch.inference_mode():
        if into:
            torch._foreach_copy_(into, new)  # pyright: ignore[reportPrivateImportUsage]


def _is_same_memory(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a contiguous value was received in place."""
    if type(target) is not torch.Tensor and is_dtensor(target):
        return False
    return value.data_ptr() == target.data_ptr() and target.is_contiguous()


def _rows(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor split along its first dimension, one row per process."""
    return leaf.detach().reshape(count, leaf.shape[0] // count, *leaf.shape[1:])


def _parts(tensor: Any, count: int, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """Nested data with the shape and dtype of each part, and the packed parts."""
    leaves = _checked_leaves(tensor, count)
    skeleton = recursively_apply(lambda leaf: _part_of(leaf, count), tensor)
    chunks = [leaf.to(device).chunk(count) if leaf.numel() else (leaf,) * count for leaf in leaves]
    layout = PackedLayout((chunk[0].shape, chunk[0].dtype) for chunk in chunks)
    packed = [torch.empty(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    for rank, buffer in enumerate(packed):
        layout.write([chunk[rank] for chunk in chunks], layout.parts(buffer))
    return skeleton, packed


def _checked_leaves(tensor: Any, count: int) -> list[torch.Tensor]:
    leaves, _ = flatten(tensor, "scatter")
    for path, leaf in leaves_with_paths(tensor):
        check_leaf(path, leaf, "scatter")
        check_divisible(path, leaf, "scatter", count)
    return leaves


def _part_of(leaf: torch.Tensor, count: int) -> TensorInformation:
    return TensorInformation(torch.Size((leaf.shape[0] // count, *leaf.shape[1:])), leaf.dtype)


def async_all_gather_bytes(data: bytes, operation: str) -> PendingCall:
    """Start to gather a few bytes of every process; `wait` on the result returns the bytes of all, by rank.

    It completes after the checked header of all collectives. If a process calls another collective meanwhile, all
    processes get the same error. The run must have several processes.

    Args:
        data: at most as many bytes as fit into a header, about 1 KiB; lengths may differ.
        operation: name of the function that the user called, for error messages.
    """
    return start_all_gather_bytes(current.process_or_start().transport, operation, data)
