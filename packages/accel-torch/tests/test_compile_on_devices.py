"""Compiled models under accumulation: with CUDA graphs on a GPU, whose outputs the next replay overwrites."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

from accel_testing.plugin import on_devices
from accel_torch import Accelerator, TorchDynamoPlugin

STEPS, ACCUMULATION = 8, 2


def losses(plugin: TorchDynamoPlugin | None, precision: str) -> list[float]:
    options: dict[str, Any] = {} if plugin is None else {"dynamo_plugin": plugin}
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, mixed_precision=precision, **options)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    kept = []
    for _ in range(STEPS):
        inputs = torch.randn(16, 32, generator=generator).to(accelerator.device)
        targets = torch.randint(8, (16,), generator=generator).to(accelerator.device)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        # Kept on the device beyond the next replay, as a loop that logs rarely does.
        kept.append(loss.detach())
    return [loss.item() for loss in kept]


def plugin_for(device: torch.device, mode: str, regional: bool) -> TorchDynamoPlugin:
    """Inductor with CUDA graphs on a GPU; elsewhere what traces the same graphs and needs no compiler."""
    if device.type != "cuda":
        return TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("Triton needs a C compiler, and there is none here")
    return TorchDynamoPlugin(backend="inductor", mode=mode, use_regional_compilation=regional)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("mode", "regional"), [("reduce-overhead", False), ("default", False), ("default", True)])
@on_devices("cpu", differs="reduce-overhead replays CUDA graphs, which write each output to the same memory")
def test_accumulated_losses_are_those_of_the_plain_model(
    device: torch.device, mode: str, regional: bool, precision: str
) -> None:
    torch.compiler.reset()
    plugin = plugin_for(device, mode, regional)
    expected = losses(None, precision)
    assert losses(plugin, precision) == pytest.approx(expected, rel=1e-3 if precision == "no" else 0.02)
