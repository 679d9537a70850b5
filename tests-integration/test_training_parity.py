"""A run on two processes is the run on one process with the same global batch, whatever else is switched on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, GradientAccumulationPlugin, set_seed

SAMPLES, GLOBAL_BATCH = 48, 8


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


def curve(options: dict[str, Any]) -> list[float]:
    """The mean loss of every global batch while training two epochs, and a number made of the weights at the end."""
    set_seed(0)
    plugin = GradientAccumulationPlugin(num_steps=options["accumulation"], sync_each_batch=options["sync_each_batch"])
    accelerator = Accelerator(cpu=True, mixed_precision=options["precision"], gradient_accumulation_plugin=plugin)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    batch_size = GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(data(), batch_size=batch_size)
    # The schedule counts batches of one process, so that of the run with fewer processes has more of them.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * batch_size / 40))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and options["clip"]:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return [*losses, weights.double().square().sum().item()]


CASES = {
    "plain": {},
    "accumulation": {"accumulation": 3},
    "accumulation that ends inside a window": {"accumulation": 4},
    "gradients reduced at every batch": {"accumulation": 3, "sync_each_batch": True},
    "clipping": {"accumulation": 2, "clip": True},
    "bf16": {"accumulation": 2, "precision": "bf16"},
}
DEFAULTS = {"accumulation": 1, "sync_each_batch": False, "precision": "no", "clip": False}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_like_one(two: Processes, case: str) -> None:
    options = {**DEFAULTS, **CASES[case]}
    with fresh():
        alone = curve(options)

    first, second = two.run(curve, options)

    tolerance = {"rtol": 0.03, "atol": 3e-3} if options["precision"] == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), **tolerance)
    assert first == second
    assert alone[-2] < alone[0] * 0.6
    assert len(set(alone)) > 6


def plain_curve() -> list[float]:
    """The same training without any library."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * GLOBAL_BATCH / 40))
    losses = []
    for _ in range(2):
        for inputs, targets in DataLoader(data(), batch_size=GLOBAL_BATCH):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return [*losses, weights.double().square().sum().item()]


def test_one_process_trains_like_plain_pytorch_to_the_bit() -> None:
    with fresh():
        expected = plain_curve()
        assert curve(DEFAULTS) == expected
