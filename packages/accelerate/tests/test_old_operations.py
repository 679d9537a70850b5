"""Old names of operations on tensors: argument names, decorators for collectives of others, batch sizes."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from accel_ops import ShapeMismatch
from accel_state import PartialState
from accel_testing.processes import Processes
from accelerate.utils.operations import (
    broadcast,
    broadcast_object_list,
    chained_operation,
    gather,
    ignorant_find_batch_size,
    is_torch_xpu_tensor,
    reduce,
    verify_operation,
)

Pair = namedtuple("Pair", "first second")
X = torch.arange(6.0).reshape(2, 3)


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def with_old_names() -> tuple[list[float], list[Any], float]:
    state = PartialState(cpu=True)
    rank = float(state.process_index)
    sent = broadcast(torch.tensor([rank]), from_process=1)
    objects = broadcast_object_list([rank], from_process=1)
    return sent.tolist(), objects, reduce(torch.tensor(rank), reduction="sum", scale=2.0).item()


def test_collectives_take_the_old_names_of_their_arguments(two: Processes) -> None:
    assert two.run(with_old_names) == [([1.0], [1.0], 2.0)] * 2


@verify_operation
def third_party(tensor: Any) -> str:
    return "ran"


@chained_operation
def two_steps(tensor: Any) -> Any:
    return gather(tensor)


def decorated() -> None:
    state = PartialState(cpu=True)
    mine = tensor(1 + state.process_index)
    with pytest.raises(ShapeMismatch, match=r"third_party\(\)"):
        third_party(mine)
    assert third_party(tensor=tensor(1)) == "ran"
    with pytest.raises(ShapeMismatch, match=r"two_steps\(\): Cannot run gather\(\)"):
        two_steps(mine)


def undecorated() -> None:
    state = PartialState(cpu=True)
    assert third_party(tensor(1 + state.process_index)) == "ran"


def test_collectives_of_others_are_checked_in_debug_mode(two: Processes) -> None:
    two.run(decorated, environment={"ACCELERATE_DEBUG_MODE": "1"})
    two.run(undecorated)


def decorated_alone() -> str:
    PartialState(cpu=True)
    return third_party(None)


def test_collectives_of_others_are_not_checked_on_a_single_process(one: Processes) -> None:
    assert one.run(decorated_alone, environment={"ACCELERATE_DEBUG_MODE": "1"}) == ["ran"]


@pytest.mark.parametrize("data", [X, [X], {"a": {"b": X}, "c": torch.ones(9)}, Pair((X,), None)])
def test_the_batch_size_of_tensors_is_found(data: Any) -> None:
    assert ignorant_find_batch_size(data) == 2


@pytest.mark.parametrize("data", [[], {}, [[], X], None, [1, X], "text", torch.tensor(1)])
def test_data_without_a_batch_size_have_none(data: Any) -> None:
    assert ignorant_find_batch_size(data) is None


def test_a_tensor_on_the_cpu_is_none_of_an_intel_gpu() -> None:
    assert not is_torch_xpu_tensor(X)
    assert not is_torch_xpu_tensor("text")
