"""Training with an Accelerator on a device comes to what plain torch comes to on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.plugin import on_devices
from accel_torch import Accelerator, GradScalerKwargs

STEPS, BATCH = 6, 8


def parts(seed: int = 0) -> tuple[nn.Module, DataLoader[Any]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    data = TensorDataset(torch.randn(STEPS * BATCH, 16), torch.randint(4, (STEPS * BATCH,)))
    return model, DataLoader(data, batch_size=BATCH)


def plain_losses(accumulation: int, limit: float) -> list[float]:
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for index, (inputs, targets) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss / accumulation).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if index % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def losses_of(accelerator: Accelerator, limit: float, **options: Any) -> list[torch.Tensor]:
    """Losses that stay on the device until the end, so that nothing waits for it on the way."""
    model, loader = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, **options)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            assert inputs.device == accelerator.device
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@on_devices("cpu", "simulated", differs="kernels run behind the host, and autocast chooses kernels of tensor cores")
def test_losses_are_near_those_of_plain_torch(device: torch.device, accumulation: int, precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulation)
    assert accelerator.device == device
    found = [loss.item() for loss in losses_of(accelerator, 0.5)]
    expected = plain_losses(accumulation, 0.5)
    assert found == pytest.approx(expected, rel=1e-4 if precision == "no" else 0.05)
    assert precision == "no" or found != expected


@on_devices("cpu", differs="the fused kernel divides by the scale itself, and skips the step on the device")
def test_a_fused_optimizer_trains_under_the_scaler(device: torch.device) -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    found = [loss.item() for loss in losses_of(accelerator, 0.5, fused=True)]
    assert found == pytest.approx(plain_losses(1, 0.5), rel=0.05)


@on_devices("cpu", "simulated", differs="whether gradients overflowed is known on the device, and read once a step")
def test_an_overflow_skips_the_step_and_halves_the_scale(device: torch.device) -> None:
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=2)]
    )
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.ones(2, 4, device=device)
    weights, scales, skipped = [], [], []
    for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
        accelerator.backward(model(inputs).float().sum() * factor)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
        weights.append(accelerator.unwrap_model(model).weight.detach().cpu().clone())
        assert accelerator.scaler is not None
        scales.append(accelerator.scaler.get_scale())
    assert skipped == [False, True, False, False, False]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0]


@on_devices("cpu", "simulated", differs="one scaler asks the device about the gradients of two optimizers")
def test_two_optimizers_share_one_scale(device: torch.device) -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    made = accelerator.prepare(*models, *(torch.optim.SGD(model.parameters(), lr=0.1) for model in models))
    first, second, *optimizers = made
    before = [accelerator.unwrap_model(model).bias.item() for model in (first, second)]
    inputs = torch.ones(2, 4, device=device)
    accelerator.backward(first(inputs).float().sum() + second(inputs).float().sum())
    for optimizer in optimizers:
        optimizer.step()
    after = [accelerator.unwrap_model(model).bias.item() for model in (first, second)]
    # The gradient of a bias is the number of samples.
    assert after == pytest.approx([value - 0.1 * 2 for value in before], rel=1e-3)


@on_devices("cpu", "simulated", differs="what the model held is given back to the allocator of the device")
def test_freed_objects_leave_no_memory_behind(device: torch.device) -> None:
    accelerator = Accelerator()
    family = accelerator.state._process.family
    accelerator.free_memory()
    before = family.used_memory()
    for _ in range(2):
        model = nn.Linear(512, 512)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(2, 512, device=device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert device.type == "cpu" or family.used_memory() - before >= 3 * 4 * 512 * 512
        model, optimizer = accelerator.free_memory(model, optimizer)
        # Workspaces of the libraries stay; they are no larger the second time.
        assert device.type == "cpu" or family.used_memory() - before < 2**26


@on_devices("cpu", differs="predictions are gathered from the device while the last batch still computes")
def test_an_evaluation_counts_each_sample_once(device: torch.device) -> None:
    accelerator = Accelerator()
    model, _ = parts()
    loader = DataLoader(TensorDataset(torch.arange(21.0)[:, None].expand(21, 16).contiguous()), batch_size=BATCH)
    model, loader = accelerator.prepare(model, loader)
    seen: list[float] = []
    with torch.no_grad():
        for (inputs,) in loader:
            outputs, first = accelerator.gather_for_metrics((model(inputs), inputs[:, 0]))
            assert outputs.device == device
            seen += first.tolist()
    assert seen == [float(number) for number in range(21)]
