"""Nested data: collectives between two processes, and operations in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bench.case import Call, Case, Scope, Side, Work

OVER_GLOO: Final = (
    'CPU time of two processes over gloo, the mean of both. "Raw" is plain torch.distributed on the same tensors, one '
    "collective for all small ones or one for each large one, without any check."
)
IN_ONE: Final = "CPU time of a call in one process."
ONE_TENSOR: Final = 'For one tensor, "raw" is the bare method of the tensor.'

Data = Callable[[], Any]


def library(scope: Scope) -> Any:
    """The operations, in a process that takes part in a run."""
    scope.library("accel_state", "accelerate").PartialState(cpu=True)
    return scope.library("accel_ops", "accelerate.utils.operations")


def small() -> dict[str, Any]:
    """64 tensors of 512 bytes."""
    import torch

    return {f"leaf{index}": torch.rand(8, 16) for index in range(64)}


def large() -> list[Any]:
    """4 tensors of 1 MiB."""
    import torch

    return [torch.rand(512, 512) for _ in range(4)]


def ragged() -> dict[str, Any]:
    """64 tensors whose lengths depend on the rank."""
    import torch

    rank = int(os.environ["RANK"])
    return {f"leaf{index}": torch.rand(4 + (index + rank) % 5, 16) for index in range(64)}


def deep() -> dict[str, Any]:
    """200 tensors in lists, tuples and dicts."""
    import torch

    pairs = {str(index): (torch.zeros(2), torch.zeros(2)) for index in range(50)}
    return {"list": [torch.zeros(2) for _ in range(100)], "pairs": pairs}


def text() -> list[str]:
    """An object of 10 KB."""
    return ["x" * 10_000]


def half() -> Any:
    """One tensor in half precision."""
    import torch

    return torch.rand(4, 16).half()


def calls(name: str, data: Data, *arguments: Any) -> Side:
    """A call of the function `name` of a library."""

    def side(scope: Scope) -> Call:
        function, value = getattr(library(scope), name), data()
        return lambda: function(value, *arguments)

    return side


def same(tensor: Any) -> Any:
    """The tensor."""
    return tensor


def applies_identity(scope: Scope) -> Call:
    """`recursively_apply` of a function that does nothing."""
    function, value = library(scope).recursively_apply, deep()
    return lambda: function(same, value)


def concatenates(scope: Scope) -> Call:
    """Two batches of 200 leaves become one."""
    function, both = library(scope).concatenate, [deep(), deep()]
    return lambda: function(both)


def floats(scope: Scope) -> Call:
    """What conversion to float32 is without any library."""
    return half().float  # type: ignore[no-any-return]


def tensors(data: Data, packed: bool) -> list[Any]:
    """What plain torch.distributed sends."""
    import torch

    value = data()
    leaves = list(value.values()) if isinstance(value, dict) else value
    return [torch.cat([leaf.reshape(-1) for leaf in leaves])] if packed else [leaf.view(-1) for leaf in leaves]


def raw(operation: str, data: Data, packed: bool, scope: Scope) -> Call:
    """The collective of plain torch.distributed."""
    import torch.distributed as dist

    given = tensors(data, packed)
    if operation == "gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: [gather(tensor.new_empty(2 * tensor.numel()), tensor) for tensor in given]
    if operation == "broadcast":
        return lambda: [dist.broadcast(tensor, 0) for tensor in given]
    return lambda: [dist.all_reduce(tensor) for tensor in given]


def collective(
    name: str, limit: float, operation: str, data: Data, by_torch: Callable[[Scope], Call] | None = None
) -> Case:
    """The case of a collective."""
    side = calls(operation, data)
    work = Work(side, side, by_torch, processes=2)
    return Case("collectives", name, "CPU ms", "ours/peer", limit, work, OVER_GLOO)


def operation(name: str, limit: float, side: Side, by_torch: Side | None = None) -> Case:
    """The case of an operation in one process."""
    method = ONE_TENSOR if by_torch else IN_ONE
    return Case("operations", name, "CPU us", "ours/peer", limit, Work(side, side, by_torch), method)


CASES: Final = (
    *(
        collective(f"{name} {what}", limit, name, data, partial(raw, name, data, packed))
        for what, data, packed, limits in (
            ("64 x (8, 16)", small, True, {"gather": 0.05, "reduce": 0.04, "broadcast": 0.1}),
            ("4 x 1 MiB", large, False, {"gather": 0.8, "reduce": 0.6, "broadcast": 1.0}),
        )
        for name, limit in limits.items()
    ),
    collective("pad_across_processes 64 ragged", 0.04, "pad_across_processes", ragged),
    collective("gather_object 10 KB", 0.65, "gather_object", text),
    collective("broadcast_object_list 10 KB", 0.65, "broadcast_object_list", text),
    operation("send_to_device 200 leaves", 0.4, calls("send_to_device", deep, "cpu")),
    operation("recursively_apply 200 leaves", 0.25, applies_identity),
    operation("find_device 200 leaves", 0.5, calls("find_device", deep)),
    operation("concatenate 2 x 200 leaves", 0.5, concatenates),
    operation("slice_tensors 200 leaves", 0.5, calls("slice_tensors", deep, slice(0, 1))),
    operation("get_data_structure 200 leaves", 0.5, calls("get_data_structure", deep)),
    operation("convert_to_fp32 200 leaves", 0.5, calls("convert_to_fp32", deep)),
    operation("convert_to_fp32 one tensor", 0.9, calls("convert_to_fp32", half), floats),
)
