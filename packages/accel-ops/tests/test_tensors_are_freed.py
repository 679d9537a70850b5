"""No tensor outlives a call until the garbage collector runs: on a GPU its memory would be missed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from accel_ops import (
    broadcast,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    gather,
    gather_object,
    get_data_structure,
    get_shape,
    honor_type,
    listify,
    pad_across_processes,
    pad_input_tensors,
    recursively_apply,
    reduce,
    scatter,
    send_to_device,
    slice_tensors,
)
from accel_ops.tree import flatten, rebuild
from accel_state.errors import UnknownKind
from accel_testing.processes import Processes


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


def nested() -> Any:
    return {"a": torch.ones(4, 2), "b": [Pair(torch.ones(4), [torch.ones(4, 1)]), (torch.ones(4),)]}


def tensors_in(data: Any) -> list[torch.Tensor]:
    found = []
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return found


@contextmanager
def without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive_after(call: Callable[[Any], Any]) -> int:
    """How many tensors of the data and of the result are left once both were dropped."""
    with without_the_collector():
        data = nested()
        result = call(data)
        references = [weakref.ref(tensor) for tensor in [*tensors_in(data), *tensors_in(result)]]
        del data, result
        return sum(reference() is not None for reference in references)


LOCAL: dict[str, Callable[[Any], Any]] = {
    "recursively_apply": lambda data: recursively_apply(lambda tensor: tensor + 1, data),
    "recursively_apply with arguments": lambda data: recursively_apply(torch.add, data, 1),
    "send_to_device": lambda data: send_to_device(data, "cpu"),
    "send_to_device without keys": lambda data: send_to_device(data, "meta", skip_keys="a"),
    "convert_to_fp32": convert_to_fp32,
    "slice_tensors": lambda data: slice_tensors(data, slice(0, 2)),
    "concatenate": lambda data: concatenate([data, data]),
    "pad_input_tensors": lambda data: pad_input_tensors(data["a"], 4, 3),
    "listify": listify,
    "get_shape": get_shape,
    "get_data_structure": get_data_structure,
    "find_batch_size": find_batch_size,
    "find_device": find_device,
    "honor_type": lambda data: honor_type(data["b"], iter(data["b"])),
    "flatten": lambda data: flatten(data, "test")[0],
    "rebuild": lambda data: rebuild(data, iter([torch.zeros(1) for _ in tensors_in(data)])),
}

SHARED: dict[str, Callable[[Any], Any]] = {
    "gather": gather,
    "reduce": reduce,
    "broadcast": broadcast,
    "scatter": scatter,
    "pad_across_processes": pad_across_processes,
    "gather_object": lambda data: gather_object([data]),
}


@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL.keys())
def test_nothing_is_left_after_a_call_of_one_process(call: Callable[[Any], Any]) -> None:
    assert alive_after(call) == 0


@pytest.mark.parametrize("call", [recursively_apply, flatten], ids=["recursively_apply", "flatten"])
def test_nothing_is_left_after_a_refused_call(call: Any) -> None:
    with without_the_collector():
        data = {"a": torch.ones(2), "b": "text"}
        reference = weakref.ref(data["a"])
        arguments = {"error_on_other_type": True} if call is recursively_apply else {}
        with pytest.raises(UnknownKind):
            call(*((torch.clone, data) if call is recursively_apply else (data, "test")), **arguments)
        del data
        assert reference() is None


def shared() -> dict[str, int]:
    return {name: alive_after(call) for name, call in SHARED.items()}


def test_nothing_is_left_after_a_collective() -> None:
    with Processes(2, timeout=250) as group:
        assert group.run(shared) == [dict.fromkeys(SHARED, 0)] * 2
