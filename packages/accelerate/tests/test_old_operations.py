"""Old names of operations on tensors: argument names, decorators for collectives of others, batch sizes."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from accel_state import PartialState
from accel_testing.processes import Processes
from accelerate.utils.operations import (
    broadcast,
    broadcast_object_list,
    ignorant_find_batch_size,
    is_torch_xpu_tensor,
    reduce,
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


@pytest.mark.parametrize("data", [X, [X], {"a": {"b": X}, "c": torch.ones(9)}, Pair((X,), None)])
def test_the_batch_size_of_tensors_is_found(data: Any) -> None:
    assert ignorant_find_batch_size(data) == 2


@pytest.mark.parametrize("data", [[], {}, [[], X], None, [1, X], "text", torch.tensor(1)])
def test_data_without_a_batch_size_have_none(data: Any) -> None:
    assert ignorant_find_batch_size(data) is None


def test_a_tensor_on_the_cpu_is_none_of_an_intel_gpu() -> None:
    assert not is_torch_xpu_tensor(X)
    assert not is_torch_xpu_tensor("text")
