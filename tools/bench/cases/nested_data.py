"""Nested data: collectives between two processes, and operations in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from bench.case import Call, Case, Scope, Side, Work

OVER_GLOO: Final = (
    "CPU time of two processes over gloo, the mean of both; wall time for large tensors, which gloo moves in threads. "
    '"Raw" is torch.distributed on the same tensors without checks: torch.cat, one collective and a split for all small'
    " tensors, or one collective for each large one."
)
IN_ONE: Final = "CPU time of a call in one process."
ONE_TENSOR: Final = 'One tensor: "raw" is the method of the tensor.'
BARE_CAT: Final = 'Concatenate: "raw" calls torch.cat for each leaf.'

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


def bare_cat(scope: Scope) -> Call:
    """`torch.cat` of each leaf of two batches, the least that joining them takes."""
    import torch
    from torch.utils._pytree import tree_leaves

    pairs = list(zip(tree_leaves(deep()), tree_leaves(deep()), strict=True))
    return lambda: list(map(torch.cat, pairs))


def floats(scope: Scope) -> Call:
    """What conversion to float32 is without any library."""
    return half().float  # type: ignore[no-any-return]


def plain(operation: str) -> Callable[[Any], Any]:
    """A collective of torch.distributed on one tensor, in place or into a new one of shape (2, ...)."""
    import torch.distributed as dist

    if operation == "gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

        def gathered(tensor: Any) -> Any:
            rows = tensor.new_empty(2, *tensor.shape)
            gather(rows.view(-1), tensor.view(-1))
            return rows

        return gathered

    def changed(tensor: Any) -> Any:
        dist.broadcast(tensor, 0) if operation == "broadcast" else dist.all_reduce(tensor)
        return tensor

    return changed


def raw_of_small(operation: str, scope: Scope) -> Call:
    """All tensors of one shape in one, the collective, and one view for each."""
    import torch

    run, leaves = plain(operation), list(small().values())
    rows = len(leaves[0])
    return lambda: run(torch.cat(leaves)).split(rows, -2)


def raw_of_large(operation: str, scope: Scope) -> Call:
    """The collective on each tensor."""
    run, leaves = plain(operation), large()
    return lambda: [run(leaf) for leaf in leaves]


def collective(name: str, limit: float, operation: str, data: Data, by_torch: Side | None = None) -> Case:
    """The case of a collective."""
    side = calls(operation, data)
    work = Work(side, side, by_torch, processes=2)
    return Case("collectives", name, "CPU ms", "ours/peer", limit, work, OVER_GLOO)


def of_small(operation: str, limit: float) -> tuple[Case, Case]:
    """A collective on many small tensors, beside the original and beside plain torch."""
    case = collective(f"{operation} 64 x (8, 16)", limit, operation, small, partial(raw_of_small, operation))
    return case, replace(case, figure="ours/raw", limit=2.5)


def of_large(operation: str) -> Case:
    """A collective on a few large tensors."""
    case = collective(f"{operation} 4 x 1 MiB", 1.0, operation, large, partial(raw_of_large, operation))
    return replace(case, unit="wall ms")


def operation(name: str, limit: float, side: Side, by_torch: Side | None = None, method: str = IN_ONE) -> Case:
    """The case of an operation in one process."""
    return Case("operations", name, "CPU us", "ours/peer", limit, Work(side, side, by_torch), method)


CASES: Final = (
    *of_small("gather", 0.05),
    *of_small("reduce", 0.04),
    *of_small("broadcast", 0.1),
    of_large("gather"),
    of_large("reduce"),
    of_large("broadcast"),
    collective("pad_across_processes 64 ragged", 0.04, "pad_across_processes", ragged),
    collective("gather_object 10 KB", 0.65, "gather_object", text),
    collective("broadcast_object_list 10 KB", 0.7, "broadcast_object_list", text),
    operation("send_to_device 200 leaves", 0.4, calls("send_to_device", deep, "cpu")),
    operation("recursively_apply 200 leaves", 0.25, applies_identity),
    operation("find_device 200 leaves", 0.5, calls("find_device", deep)),
    operation("concatenate 2 x 200 leaves", 0.5, concatenates, bare_cat, BARE_CAT),
    operation("slice_tensors 200 leaves", 0.5, calls("slice_tensors", deep, slice(0, 1))),
    operation("get_data_structure 200 leaves", 0.5, calls("get_data_structure", deep)),
    operation("convert_to_fp32 200 leaves", 0.5, calls("convert_to_fp32", deep)),
    operation("convert_to_fp32 one tensor", 0.9, calls("convert_to_fp32", half), floats, ONE_TENSOR),
)
