"""Tensor parallelism with a GPU for each process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_state.mesh import ParallelismConfig
from accel_testing.plugin import GPU_PROCESSES, on_devices, working_on
from accel_testing.processes import Processes
from accel_torch import Accelerator, TorchTensorParallelPlugin

PLAN = {"up": "colwise", "down": "rowwise"}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


def train(model: nn.Module, accelerator: Accelerator | None) -> list[float]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu") if accelerator is None else accelerator.device
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)).to(device)
    losses = []
    for _ in range(4):
        loss = model(inputs).square().mean()
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def divided(kind: str, count: int) -> list[float]:
    with working_on(kind):
        accelerator = Accelerator(
            parallelism_config=ParallelismConfig(tp_size=count),
            torch_tp_plugin=TorchTensorParallelPlugin(count, parallelize_plan=PLAN),
        )
        return train(Halves(), accelerator)


@on_devices("cpu", gpus=2, differs="partial sums are added up by NCCL between the GPUs, in the middle of forward")
def test_a_divided_model_trains_like_a_whole_one(device: torch.device, two: Processes, gpus: Processes) -> None:
    if device.type == "cuda" and GPU_PROCESSES < 2:
        pytest.skip("one process was started; --nproc says how many")
    group = gpus if device.type == "cuda" else two
    expected = train(Halves(), None)
    for found in group.run(divided, device.type, group.count):
        assert found == pytest.approx(expected, rel=1e-4)
