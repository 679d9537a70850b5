"""What is said of memory, against what a device counts; and a device that really runs out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import dispatch_model, get_max_memory, infer_auto_device_map
from accel_bigmodel.estimate import estimate_memory
from accel_ops import find_executable_batch_size
from accel_state.devices.select import family_of
from accel_testing.plugin import on_devices, room_for
from accel_torch import Accelerator

WIDTH = 1024


@on_devices("simulated", differs="the allocator is really out of memory, and has a cache to give back")
def test_batches_become_smaller_until_one_fits(device: torch.device) -> None:
    tried: list[int] = []
    sample = 2**22

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        batch = torch.ones(batch_size, sample // 4, device=device)
        return int((batch.sum() / (sample // 4)).item())

    with room_for(device, 20 * sample + sample // 2):
        fitted = train()
        again = train()
    assert tried[0] == 64
    assert 8 <= fitted <= 20
    assert again == fitted == tried[-1]
    assert tried == sorted(tried, reverse=True)


@on_devices("simulated", differs="the allocator rounds sizes up, and libraries take workspaces")
def test_the_estimate_of_training_is_near_the_peak(device: torch.device) -> None:
    accelerator = Accelerator()
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    (estimate,) = estimate_memory(model, ["float32"])
    assert estimate.training is not None
    optimizer: Any = torch.optim.Adam(model.parameters(), foreach=False)
    inputs = torch.ones(2, WIDTH, device=device)
    (inputs @ torch.ones(WIDTH, WIDTH, device=device)).sum().item()
    family = family_of(device)
    family.empty_cache()
    before = family.used_memory()
    family.reset_peak_memory()
    model, optimizer = accelerator.prepare(model, optimizer)
    placed = family.used_memory() - before
    for _ in range(2):
        accelerator.backward(model(inputs).sum())
        optimizer.step()
    family.synchronize()
    assert placed == pytest.approx(estimate.total, rel=0.02)
    assert 0.95 * estimate.training < family.peak_memory() - before < 1.6 * estimate.training


@on_devices("simulated", differs="the budget is what the driver says is free, other processes counted")
def test_a_device_map_keeps_to_its_budget(device: torch.device) -> None:
    block = 4 * WIDTH * WIDTH
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    assert 0 < get_max_memory()[0] <= family_of(device).free_memory()
    budget = 3 * block + block // 2
    device_map = infer_auto_device_map(model, {0: budget, "cpu": 10 * block})
    assert {0, "cpu"} <= set(device_map.values())
    before = family_of(device).used_memory()
    dispatch_model(model, device_map, max_prefetch_bytes=0)
    assert block <= family_of(device).used_memory() - before <= budget
    with torch.no_grad():
        family_of(device).reset_peak_memory()
        assert model(torch.ones(2, WIDTH, device=device)).isfinite().all()
    assert family_of(device).peak_memory() - before < budget + 2 * block + 2**26
