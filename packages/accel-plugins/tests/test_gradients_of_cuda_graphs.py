"""Gradients that accumulate in a model whose CUDA graphs are replayed, each time into the same memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.transforms.compile import GradientCopies
from accel_plugins.transforms.config import TorchDynamoPlugin


class Replayed(torch.autograd.Function):
    """A product whose gradient is written to the same memory each time, as by the replay of a CUDA graph."""

    memory = torch.zeros(3)

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        # A replay of the forward pass also writes to the memory of the gradients.
        Replayed.memory.fill_(float("nan"))
        ctx.save_for_backward(inputs)
        return weight * inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (inputs,) = ctx.saved_tensors
        return Replayed.memory.copy_(gradients[0] * inputs).view(3), None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> Any:
        return Replayed.apply(self.weight, inputs)  # type: ignore[no-untyped-call]


def micro_batch(model: nn.Module, value: float) -> None:
    model(torch.full((3,), value)).sum().backward()


def test_gradients_of_a_window_are_added_to_a_copy() -> None:
    model = Model()
    model.register_forward_pre_hook(GradientCopies())
    for _ in range(2):
        for value in (1.0, 2.0, 4.0):
            micro_batch(model, value)
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [7.0] * 3
        model.zero_grad()


def test_without_the_copy_the_gradients_are_lost() -> None:
    model = Model()
    micro_batch(model, 1.0)
    micro_batch(model, 2.0)
    assert model.weight.grad is not None
    # The second gradient was added to itself.
    assert model.weight.grad.tolist() == [4.0] * 3


def test_one_copy_is_made_for_each_window() -> None:
    model = Model()
    model.register_forward_pre_hook(GradientCopies())
    micro_batch(model, 1.0)
    first = model.weight.grad
    micro_batch(model, 2.0)
    second = model.weight.grad
    micro_batch(model, 3.0)
    assert second is not first
    assert model.weight.grad is second


def test_a_model_with_the_hook_can_be_copied_and_pickled() -> None:
    hook = GradientCopies()
    model = nn.Linear(2, 2)
    hook(model, ())
    model(torch.ones(1, 2)).sum().backward()
    hook(model, ())
    for other in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        other(model, ())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"backend": "inductor", "mode": "reduce-overhead"}, True),
        ({"backend": "inductor", "mode": "max-autotune"}, True),
        ({"backend": "inductor", "options": {"triton.cudagraphs": True}}, True),
        ({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "inductor"}, False),
        ({"backend": "inductor", "mode": "reduce-overhead", "disable": True}, False),
        ({"backend": "eager", "mode": "reduce-overhead"}, False),
    ],
)
def test_which_settings_capture_cuda_graphs(settings: dict[str, Any], expected: bool) -> None:
    assert TorchDynamoPlugin(**settings).captures_cuda_graphs is expected
