"""Optimizers under sharding: those that make their state at once follow the parameters, others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_plugins.sharded_optimizers import check_shardable
from accel_state.errors import AccelError, NotOffered
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelPlugin

PLAN = {"0": "colwise", "2": "rowwise"}


def model_of(width: int = 6) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).double()


def batch_of(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double()


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.2)


def train(model: Any, optimizer: Any, steps: range, backward: Any = Tensor.backward) -> None:
    for step in steps:
        backward(model(batch_of(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def accelerator_of(layout: str) -> Accelerator:
    if layout == "tp":
        parallel, plan = ParallelismConfig(tp_size=2), TorchTensorParallelPlugin(parallelize_plan=PLAN)
        return Accelerator(cpu=True, parallelism_config=parallel, torch_tp_plugin=plan)
    version = int(layout[-1])
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(version))


def trained(layout: str, folder: str) -> dict[str, Any]:
    """Weights after three steps, a save, a step, a resume, and two steps more."""
    accelerator = accelerator_of(layout)
    model = model_of(5 if layout == "fsdp2" else 6)
    model, optimizer = accelerator.prepare(model, adagrad(model))
    train(model, optimizer, range(3), accelerator.backward)
    accelerator.save_state(folder)
    train(model, optimizer, range(7, 8), accelerator.backward)
    accelerator.load_state(folder)
    train(model, optimizer, range(3, 5), accelerator.backward)
    return {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
def test_adagrad_trains_as_in_one_process(two: Processes, layout: str, tmp_path: Path) -> None:
    expected = model_of(5 if layout == "fsdp2" else 6)
    train(expected, adagrad(expected), range(5))
    weights = two.run(trained, layout, str(tmp_path))[0]
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(torch.tensor(weights[name]).double(), value, rtol=1e-5, atol=1e-7)


def refusal(layout: str, kind: str, width: int = 6) -> list[Any]:
    """The refusal of an optimizer, and whether its model is unchanged and trains with another one."""
    accelerator = accelerator_of(layout)
    model = model_of(width)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    with pytest.raises(AccelError) as caught:
        accelerator.prepare(model, optimizer)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))
    return [type(caught.value).__name__, str(caught.value)]


@pytest.mark.parametrize(
    ("layout", "kind", "parts"),
    [
        ("fsdp2", "Adafactor", ["Cannot prepare Adafactor", "DTensor", "AdamW"]),
        ("fsdp2", "Rprop", ["Cannot prepare Rprop", "DTensor", "AdamW"]),
        ("tp", "Adafactor", ["Cannot prepare Adafactor", "DTensor", "AdamW"]),
        ("fsdp1", "Adagrad", ["Cannot prepare Adagrad", "constructor", "fsdp_version=2"]),
    ],
)
def test_an_optimizer_that_cannot_step_shards_is_refused(
    two: Processes, layout: str, kind: str, parts: list[str]
) -> None:
    for error, message in two.run(refusal, layout, kind):
        assert error == "NotOffered"
        assert all(part in message for part in parts), message


def test_a_plan_whose_inner_size_does_not_divide_is_refused(two: Processes) -> None:
    for error, message in two.run(refusal, "tp", "SGD", 5):
        assert error == "SettingError"
        assert "the 5 outputs of '0' over 2 processes" in message
        assert "colwise_rep" in message


def test_a_state_on_the_meta_device_is_refused() -> None:
    with pytest.raises(NotOffered, match="meta device"):
        check_shardable(torch.optim.Adagrad(nn.Linear(2, 2, device="meta").parameters()))
    check_shardable(torch.optim.Adagrad(nn.Linear(2, 2).parameters()))
