"""How often a training step waits for the device: never, except where torch's gradient scaler must read an overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_testing.plugin import on_devices
from accel_torch import Accelerator, GradScalerKwargs

STEPS = 4


class Waiting(TorchDispatchMode):
    """Counts the operations that bring values of the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        source = args[1] if name == "aten::copy_" else args[0] if args else None
        leaves = isinstance(source, torch.Tensor) and not source.is_cpu
        arrives = isinstance(result, torch.Tensor) and result.is_cpu
        if leaves and (name == "aten::_local_scalar_dense" or (arrives and name in ("aten::copy_", "aten::_to_copy"))):
            self.count += 1
        return result


def steps(
    precision: str, fused: bool, accumulation: int, clips: bool, schedules: bool, asks: bool = False
) -> tuple[float, list[bool]]:
    """The waits of a step after the first ones, and which steps were skipped; the third overflows in fp16."""
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
    )
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    inputs = torch.ones(2, 4, device=accelerator.device)
    skipped: list[bool] = []
    counted = Waiting()

    def step(index: int) -> None:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                factor = math.inf if (index, precision) == (2, "fp16") else 1.0
                accelerator.backward(model(inputs).square().mean() * factor)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if schedules:
                    schedule.step()
                optimizer.zero_grad()
        if asks:
            skipped.append(optimizer.step_was_skipped)
            skipped.append(accelerator.optimizer_step_was_skipped)

    # The guard against misuse, and the sample of replicas, watch the first two steps.
    for index in range(2):
        step(index)
    with counted:
        for index in range(2, 2 + STEPS):
            step(index)
    if schedules:
        made = 1 + STEPS + (precision != "fp16")
        assert schedule.get_last_lr() == [0.1 * 0.5**made]
    return counted.count / STEPS, skipped


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("precision", "fused", "schedules", "waits"),
    [
        ("no", False, True, 0),
        ("no", True, True, 0),
        ("bf16", False, True, 0),
        ("bf16", True, True, 0),
        ("fp16", False, False, 1),
        ("fp16", False, True, 1),
        ("fp16", True, False, 0),
        ("fp16", True, True, 1),
    ],
)
@on_devices("simulated", differs="waiting for a GPU stops the host until all of its kernels have run")
def test_a_step_waits_for_the_device_no_more_than_torch(
    device: torch.device, precision: str, fused: bool, schedules: bool, waits: int, accumulation: int, clips: bool
) -> None:
    assert steps(precision, fused, accumulation, clips, schedules)[0] == waits


@pytest.mark.parametrize(("fused", "schedules"), [(False, True), (True, False), (True, True)])
@on_devices("simulated", differs="whether a fused optimizer has stepped is known on the device only")
def test_asking_whether_a_step_was_skipped_waits_once(device: torch.device, fused: bool, schedules: bool) -> None:
    waits, skipped = steps("fp16", fused, 1, True, schedules, asks=True)
    assert waits == 1
    assert skipped == [False] * 4 + [True, True] + [False] * 6


@on_devices("simulated", differs="whether a fused optimizer has stepped is known on the device only")
def test_a_fused_optimizer_does_not_report_the_overflow_of_another(device: torch.device) -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    first, second, *prepared = accelerator.prepare(*models, *optimizers)
    inputs = torch.ones(1, 2, device=accelerator.device)
    accelerator.backward(first(inputs).sum() + second(inputs).sum() * math.inf)
    for optimizer in prepared:
        optimizer.step()
    # The scale is updated with the overflows of both.
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 32.0
    assert [optimizer.step_was_skipped for optimizer in prepared] == [False, True]
