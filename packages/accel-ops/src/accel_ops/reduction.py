"""reduce and reduce_scatter: combine the tensors of all processes element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, Final

import torch

from accel_ops.checked_call import CheckedCall, Plan, check_alone, check_divisible, check_leaf, transport_of
from accel_ops.groups import Group
from accel_ops.tree import rebuild, recursively_apply
from accel_state.errors import SettingError, UnknownKind
from accel_state.transport.base import Reduction, Transport, Work

__all__ = ("REDUCED_PACKED_BYTES", "reduce", "reduce_scatter")

_REDUCTIONS: Final = ("mean", "sum", "product", "max", "min", "none")

_REDUCTION_SENT: Final[dict[str, Reduction]] = {
    "mean": "sum",
    "sum": "sum",
    "product": "product",
    "max": "max",
    "min": "min",
}

REDUCED_PACKED_BYTES: Final = 4 * 1024 * 1024
"""Bytes up to which a leaf is packed: gloo adds up one large tensor faster than several of a megabyte at once."""

_MAX_GATHERED_BYTES: Final = 8 * 1024 * 1024
"""Bytes of all processes together up to which each process itself adds up the packed tensors of several dtypes."""

_WIDER_DTYPES: Final = {torch.int16: torch.int32}
"""Sums of these dtypes are computed in a wider dtype that backends can add; the result wraps around as usual."""

_SUMMABLE_DTYPES: Final = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)


def reduce(tensor: Any, op: str = "mean", scale: float = 1.0, *, group: Group = None) -> Any:
    """Compute the element-wise mean, sum, product, maximum or minimum over all processes, on every process.

    The input is not changed. The results are bitwise equal on all processes. Sums and maxima of bools are "any",
    products and minima are "all". A maximum or minimum is NaN where any process has NaN.

    Args:
        tensor: a tensor, or nested data with only tensors as leaves; shapes and dtypes equal on all processes.
        op: "mean", "sum", "product", "max", "min", or "none", which returns the data unchanged.
        scale: factor for the result.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: `op` is unknown, or this process is not in the group.
        UnknownKind: a leaf cannot be added up or compared, or is of integers although the result is not.
        ShapeMismatch: on every process, when their calls, structures, shapes or dtypes differ.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> loss = reduce(loss, "mean")
    """
    if op not in _REDUCTIONS:
        raise SettingError(
            f"Cannot reduce with op={op!r}.",
            "There is no such reduction.",
            f"Pass one of {', '.join(map(repr, _REDUCTIONS))}.",
        )
    transport = transport_of(group, "reduce")
    if op == "none":
        return tensor
    check = _check_of(op, op == "mean" or scale != 1.0)
    if transport.world_size == 1:
        check_alone("reduce", tensor, check)
        return tensor if scale == 1.0 else recursively_apply(torch.mul, tensor, scale)
    with CheckedCall(transport, "reduce", op=op, scale=scale) as call:
        plan, leaves = call.plan(tensor, check=check, packed_bytes=REDUCED_PACKED_BYTES)
        divisor = transport.world_size if op == "mean" else 1
        return rebuild(
            tensor, plan.on_devices(_reduce(call, transport, plan, leaves, _REDUCTION_SENT[op], divisor, scale))
        )


def reduce_scatter(tensor: Any, op: str = "sum", *, group: Group = None) -> Any:
    """Reduce tensors and split the result along the first dimension into equal slices; process r gets slice r.

    Args:
        tensor: a tensor, or nested data with only tensors as leaves, each with a first dimension that is
            a multiple of the number of processes; shapes and dtypes equal on all processes.
        op: "mean", "sum", "product", "max" or "min".
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: `op` is unknown, this process is not in the group, or a tensor cannot be split evenly; the error
            names its path.
        UnknownKind: a leaf cannot be added up or compared, or is of integers although the result is not.
        ShapeMismatch: on every process, when their calls, structures, shapes or dtypes differ.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> mine = reduce_scatter(torch.ones(8), "sum")
    """
    if op not in _REDUCTION_SENT:
        raise SettingError(
            f"Cannot reduce and scatter with op={op!r}.",
            "There is no such reduction.",
            f"Pass one of {', '.join(map(repr, _REDUCTION_SENT))}.",
        )
    transport = transport_of(group, "reduce_scatter")
    count, check = transport.world_size, _check_of(op, op == "mean")

    def check_both(path: str, leaf: torch.Tensor, operation: str) -> None:
        check(path, leaf, operation)
        check_divisible(path, leaf, operation, count)

    if count == 1:
        check_alone("reduce_scatter", tensor, check_both)
        return tensor
    with CheckedCall(transport, "reduce_scatter", op=op) as call:
        plan, leaves = call.plan(tensor, check=check_both, packed_bytes=REDUCED_PACKED_BYTES)
        divisor = count if op == "mean" else 1
        totals = _reduce(call, transport, plan, leaves, _REDUCTION_SENT[op], divisor, 1.0)
        sizes = [total.shape[0] // count for total in totals]
        parts = [total.narrow(0, transport.rank * n, n).clone() for total, n in zip(totals, sizes, strict=True)]
        return rebuild(tensor, plan.on_devices(parts))


def _reduce(
    call: CheckedCall,
    transport: Transport,
    plan: Plan,
    leaves: Sequence[torch.Tensor],
    op: Reduction,
    divisor: int,
    scale: float,
) -> list[torch.Tensor]:
    def prepare(leaf: torch.Tensor) -> tuple[Callable[[], Work], torch.Tensor]:
        summand = _summand(leaf)
        total = torch.empty_like(summand)
        return partial(_add, transport, summand, op, total), total

    def prepare_packed(packed: torch.Tensor) -> tuple[Callable[[], Work], Sequence[torch.Tensor]]:
        if _is_gathered(plan, transport):
            rows = packed.new_empty(transport.world_size, packed.numel())
            return partial(transport.all_gather, rows.view(-1), packed), plan.layout.parts(rows)
        # All in one row: the sums are computed in place.
        sums = [_summand(part) for part in plan.layout.parts(packed)]
        return lambda: _Together(_add(transport, summand, op) for summand in sums), [total[None] for total in sums]

    # Every process combines the same rows in the same order, so the results are bitwise equal.
    parts, large = call.exchange(plan, leaves, prepare, prepare_packed)
    totals = [_scaled(_combined(rows, op), divisor, scale) for rows in parts]
    small = plan.layout.split(
        [total.to(segment.dtype) for segment, total in zip(plan.layout.segments, totals, strict=True)]
    )
    dtypes = [leaves[position].dtype for position in plan.large]
    return plan.in_order(
        small, [_scaled(total, divisor, scale).to(dtype) for total, dtype in zip(large, dtypes, strict=True)]
    )


def _is_gathered(plan: Plan, transport: Transport) -> bool:
    """Whether the packed leaves are gathered on every process and added up there.

    A backend can sum only numbers of one dtype in a collective, so several dtypes would need several collectives.
    """
    return len(plan.layout.segments) > 1 and plan.layout.nbytes * transport.world_size <= _MAX_GATHERED_BYTES


def _summand(values: torch.Tensor) -> torch.Tensor:
    return values.to(_WIDER_DTYPES.get(values.dtype, values.dtype))


def _combined(rows: torch.Tensor, op: Reduction) -> torch.Tensor:
    if op in ("sum", "product"):
        return rows.sum(0, dtype=rows.dtype) if op == "sum" else rows.prod(0, dtype=rows.dtype)
    return rows.amax(0) if op == "max" else rows.amin(0)


def _add(transport: Transport, values: torch.Tensor, op: Reduction, into: torch.Tensor | None = None) -> Work:
    """Start to reduce `values`, in place or into `into`. Backends add bools as bytes, so sums of bools use "max"."""
    if values.dtype is torch.bool:
        bytewise: Reduction = "min" if op in ("min", "product") else "max"
        return transport.all_reduce(
            values.view(torch.uint8), bytewise, None if into is None else into.view(torch.uint8)
        )
    if op in ("sum", "product") or not values.is_floating_point():
        return transport.all_reduce(values, op, into)
    # How backends treat NaN depends on the order of the processes.
    spoilt = values.isnan()
    return _WithNaN(
        transport.all_reduce(values, op, into),
        transport.all_reduce(spoilt.view(torch.uint8), "max"),
        values if into is None else into,
        spoilt,
    )


class _Together(list[Work]):
    """Several works as one."""

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        for work in self:
            work.wait(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self)


class _WithNaN:
    """Work that computes extremes which are NaN where any process had NaN."""

    __slots__ = ("_marks", "_spoilt", "_target", "_values")

    def __init__(self, values: Work, marks: Work, target: torch.Tensor, spoilt: torch.Tensor) -> None:
        self._values, self._marks, self._target, self._spoilt = values, marks, target, spoilt

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self._values.wait(timeout)
        self._marks.wait(timeout)
        self._target.masked_fill_(self._spoilt, math.nan)

    def is_completed(self) -> bool:
        return self._values.is_completed() and self._marks.is_completed()


def _scaled(total: torch.Tensor, divisor: int, scale: float) -> torch.Tensor:
    if divisor != 1:
        total.div_(divisor)
    return total if scale == 1.0 else total.mul_(scale)


@cache
def _check_of(op: str, is_fraction: bool) -> Callable[[str, torch.Tensor, str], None]:
    """The check of a leaf: always the same function for the same arguments, because plans are cached by it.

    Args:
        op: the operation.
        is_fraction: whether results are divided or scaled.
    """

    def check(path: str, leaf: torch.Tensor, operation: str) -> None:
        check_leaf(path, leaf, operation)
        if leaf.dtype not in _SUMMABLE_DTYPES:
            raise _not_summable(
                path, leaf, f"Tensors of {leaf.dtype} cannot be added up.", "Convert it to float32 first."
            )
        if leaf.is_complex() and op == "product":
            raise _not_summable(
                path, leaf, "Backends do not multiply complex numbers.", "Use gather() and multiply then."
            )
        if leaf.is_complex() and op in ("max", "min"):
            raise _not_summable(path, leaf, "Complex numbers have no order.", "Reduce .abs() or the real part.")
        if is_fraction and not (leaf.is_floating_point() or leaf.is_complex()):
            obstacle = f"A mean or a multiple of integers is not an integer, and the dtype is {leaf.dtype}."
            raise _not_summable(path, leaf, obstacle, 'Convert it with .float() first, or use op="sum" without scale.')

    return check


def _not_summable(path: str, leaf: torch.Tensor, obstacle: str, remedy: str) -> UnknownKind:
    where = f"the leaf {path}" if path else "the tensor"
    return UnknownKind(f"Cannot reduce {where} of dtype {leaf.dtype}.", obstacle, remedy)
