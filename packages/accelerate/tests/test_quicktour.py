"""The first example of the original's documentation, word for word where it matters, on one process and on two."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accelerate import Accelerator

SAMPLES = 61
GLOBAL_BATCH = 8


def train() -> tuple[list[float], int, list[float]]:
    """Trains a line to a line; returns the weights, the number of evaluated samples, and their targets."""
    torch.manual_seed(0)
    samples = torch.randn(SAMPLES, 3)
    goal = samples @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = nn.Linear(3, 1)
    loss_function = nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)

    accelerator = Accelerator(cpu=True)
    batch_size = GLOBAL_BATCH // accelerator.num_processes
    training_dataloader = DataLoader(TensorDataset(samples[:56], goal[:56]), batch_size=batch_size, shuffle=True)
    validation_dataloader = DataLoader(TensorDataset(samples, goal), batch_size=batch_size)

    device = accelerator.device
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    for _ in range(20):
        for batch in training_dataloader:
            optimizer.zero_grad()
            inputs, targets = batch
            assert inputs.device == device
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()

    validation_dataloader = accelerator.prepare(validation_dataloader)
    seen: list[float] = []
    errors: list[float] = []
    for inputs, targets in validation_dataloader:
        predictions = model(inputs)
        all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
        seen += all_targets.flatten().tolist()
        errors += (all_predictions - all_targets).abs().flatten().tolist()
    assert seen == pytest.approx(goal.flatten().tolist())
    weights = accelerator.unwrap_model(model).weight.detach().flatten().tolist()
    return weights, len(seen), errors


def test_quicktour_on_one_process() -> None:
    with fresh():
        weights, seen, errors = train()
    assert weights == pytest.approx([1.0, -2.0, 0.5], abs=0.01)
    assert seen == SAMPLES
    assert max(errors) < 0.1


def test_quicktour_on_two_processes(two: Processes) -> None:
    (weights, seen, errors), other = two.run(train)
    assert weights == pytest.approx([1.0, -2.0, 0.5], abs=0.01)
    assert other == (weights, seen, errors)
    assert seen == SAMPLES
