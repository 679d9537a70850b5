"""Schedules that `prepare` returned have the learning rates of a plain loop, to the end and inside of windows."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, GradScalerKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")

UPDATES = 7
"""Optimizer steps of a run; with windows of several micro-batches the last one is short."""


class Falling(lr_scheduler.LRScheduler):
    """A scheduler of a script, with a length, which cannot step past it."""

    def __init__(self, optimizer: Optimizer, total_steps: int) -> None:
        self.total_steps = total_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch > self.total_steps:
            raise ValueError("The schedule has ended.")
        return [rate * (1 - self.last_epoch / self.total_steps) for rate in self.base_lrs]


def one_cycle(optimizer: Optimizer, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)


def warmed(optimizer: Optimizer, steps: int) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), one_cycle(optimizer, steps - 2)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: Optimizer, steps: int) -> Any:
    parts = [one_cycle(optimizer, steps), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


# Each takes the optimizer and the number of steps that it should last.
SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {
    "one cycle": one_cycle,
    "a script's own": Falling,
    "cyclic": lambda optimizer, steps: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, step_size_up=3),
    "cosine": lr_scheduler.CosineAnnealingLR,
    "warm restarts": lambda optimizer, steps: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "lambda": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * steps)),
    "multiplied": lambda optimizer, steps: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "stairs": lambda optimizer, steps: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "milestones": lambda optimizer, steps: lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5),
    "polynomial": lambda optimizer, steps: lr_scheduler.PolynomialLR(optimizer, steps),
    "warm-up, then one cycle": warmed,
    "chain of one cycle and a decay": chained,
}


def plain_rates(build: Callable[[Optimizer, int], Any], stride: int, steps: int) -> list[float]:
    """The rates after each update of a plain loop, whose schedule moves by a stride; torch raises past its end."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = build(optimizer, steps)
    rates = []
    for _ in range(UPDATES):
        optimizer.step()
        with contextlib.suppress(ValueError):
            for _ in range(stride):
                scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def loop(accelerator: Any, name: str, steps: int) -> tuple[Any, list[float], Callable[[int], None]]:
    """The prepared scheduler, the rates after each update, and what trains for a number of updates."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = SCHEDULES[name](optimizer, steps)
    window = accelerator.gradient_accumulation_steps
    # Alone in its window, the last micro-batch is that of a short one.
    batches = (UPDATES - 1) * window + 1
    data = TensorDataset(torch.zeros(batches * accelerator.num_processes, 1))
    size = accelerator.num_processes if accelerator.split_batches else 1
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, batch_size=size)
    )
    rates: list[float] = []

    def train(updates: int) -> None:
        wanted = len(rates) + updates
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            if len(rates) == wanted:
                break

    return scheduler, rates, train


def trained_rates(name: str, steps: int, **options: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A milestone of SequentialLR passes an epoch, which torch warns of.
        warnings.filterwarnings("ignore", "The epoch parameter")
        _, rates, train = loop(Accelerator(cpu=True, **options), name, steps)
        train(UPDATES)
    return rates


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_follows_optimizer_steps(name: str, window: int) -> None:
    rates = trained_rates(name, UPDATES, gradient_accumulation_steps=window)

    assert rates == plain_rates(SCHEDULES[name], 1, UPDATES)


def rates_in_one_run(cases: list[tuple[str, int, int, bool]]) -> list[list[float]]:
    return [
        trained_rates(
            name,
            steps,
            gradient_accumulation_steps=window,
            dataloader_config=DataLoaderConfiguration(split_batches=split),
        )
        for name, steps, window, split in cases
    ]


def test_a_schedule_moves_by_the_number_of_processes_and_not_past_its_end(two: Processes) -> None:
    lengths = (2 * UPDATES, 2 * UPDATES - 1)
    cases = [(name, steps, window, False) for name in SCHEDULES for steps in lengths for window in (1, 4)]
    cases += [(name, UPDATES, window, True) for name in SCHEDULES for window in (1, 4)]
    expected = [plain_rates(SCHEDULES[name], 1 if split else 2, steps) for name, steps, _, split in cases]
    for rates in two.run(rates_in_one_run, cases):
        for case, ours, plain in zip(cases, rates, expected, strict=True):
            assert ours == plain, case


@pytest.mark.parametrize("adjust", [True, False])
def test_no_schedule_is_adjusted_inside_of_a_window(adjust: bool) -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=adjust)
    rates = trained_rates("one cycle", UPDATES, gradient_accumulation_plugin=plugin)

    assert rates == plain_rates(one_cycle, 1, UPDATES)


def test_a_schedule_that_does_not_follow_its_optimizer_steps_at_each_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, one_cycle(optimizer, 8))
    rates = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
                scheduler.step()
                rates.append(scheduler.get_last_lr()[0])

    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    cycle = one_cycle(plain, 8)
    expected = []
    for _ in range(2):
        plain.step()
        cycle.step()
        cycle.step()
        expected.append(cycle.get_last_lr()[0])
    assert rates == expected


def test_a_schedule_waits_when_fp16_skips_a_step() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)],
    )
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, one_cycle(optimizer, 3))
    rates = []
    for overflows in (True, False, False, False):
        for _ in range(2):
            with accelerator.accumulate(model):
                factor = math.inf if overflows else 1.0
                accelerator.backward(model(torch.ones(1, 1)).float().sum() * factor)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])

    start = plain_rates(one_cycle, 0, 3)[:1]
    assert rates == start + plain_rates(one_cycle, 1, 3)[:3]


@pytest.mark.parametrize("name", ["one cycle", "a script's own", "warm-up, then one cycle"])
def test_a_resumed_schedule_goes_on_to_its_end(name: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    _, rates, train = loop(accelerator, name, UPDATES)
    train(3)
    accelerator.save_state(str(tmp_path / "checkpoint"))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    _, resumed, train = loop(accelerator, name, UPDATES)
    accelerator.load_state(str(tmp_path / "checkpoint"))
    train(UPDATES - 3)

    assert rates + resumed == plain_rates(SCHEDULES[name], 1, UPDATES)


def rates_of_a_schedule_created_in_the_middle() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    one_cycle(optimizer, 10)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10, last_epoch=5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(4):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def test_a_schedule_created_at_a_later_position_ends_in_time(two: Processes) -> None:
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    cycle = one_cycle(plain, 10)
    every = [cycle.get_last_lr()[0]]
    for _ in range(10):
        plain.step()
        cycle.step()
        every.append(cycle.get_last_lr()[0])
    for rates in two.run(rates_of_a_schedule_created_in_the_middle):
        assert rates == [every[8], every[10], every[10], every[10]]
