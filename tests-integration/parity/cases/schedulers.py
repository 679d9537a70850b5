"""How prepared schedulers follow their optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin


def _rates(accelerator: Any, make: Any, samples: int = 12, batch_size: int = 2, by_hand: bool = False) -> Any:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = DataLoader(TensorDataset(torch.ones(samples, 1)), batch_size=batch_size)
    scheduler = make(optimizer)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    seen = []
    for (inputs,) in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            if not by_hand or accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        seen.append(scheduler.get_last_lr()[0])
    return {"rates": seen, "epoch": scheduler.state_dict()["last_epoch"]}


def _counted(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_step_for_each_process() -> Any:
    return _rates(Accelerator(cpu=True), _counted)


def one_step_with_split_batches() -> Any:
    return _rates(Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)), _counted)


def one_step_when_it_does_not_follow() -> Any:
    return _rates(Accelerator(cpu=True, step_scheduler_with_optimizer=False), _counted)


def during_accumulation() -> Any:
    return _rates(Accelerator(cpu=True, gradient_accumulation_steps=2), _counted)


def during_accumulation_unadjusted() -> Any:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)
    return _rates(Accelerator(cpu=True, gradient_accumulation_plugin=plugin), _counted)


def of_stairs() -> Any:
    return _rates(Accelerator(cpu=True), lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5))


def of_a_cosine() -> Any:
    return _rates(Accelerator(cpu=True), lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10))


def of_a_cycle_past_its_end() -> Any:
    def make(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=5)

    accelerator = Accelerator(cpu=True)
    return _rates(accelerator, make, samples=6 if accelerator.num_processes == 1 else 12)


def of_a_cycle_during_accumulation() -> Any:
    def make(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=6)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return _rates(accelerator, make, samples=24)


def with_an_adjusted_scheduler() -> Any:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    rates = _rates(accelerator, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=6))
    return [rates, accelerator.gradient_state.adjust_scheduler]


def of_a_chain() -> Any:
    def make(optimizer: Any) -> Any:
        warm = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2])

    return _rates(Accelerator(cpu=True), make)


def counter_of_steps() -> Any:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, _counted(optimizer))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    return [state["last_epoch"], state["_step_count"], scheduler.scheduler.last_epoch]


def names_of_wrappers() -> Any:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer, scheduler = accelerator.prepare(optimizer, _counted(optimizer))
    kinds = [type(optimizer).__name__, type(scheduler).__name__, isinstance(optimizer, torch.optim.Optimizer)]
    return [*kinds, len(optimizer.param_groups), optimizer.step_was_skipped, len(scheduler.optimizers)]
