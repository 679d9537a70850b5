"""A small training run under DeepSpeed or without, told what to do by a JSON text; prints its losses as one."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.deepspeed.config import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel_torch import Accelerator


def main(
    plugin: dict[str, Any] | None = None,
    precision: str = "no",
    accumulation: int = 1,
    dummies: bool = False,
    save: str | None = None,
    load: str | None = None,
    epochs: int = 2,
    schedules_itself: bool = False,
) -> None:
    """Train for a few epochs.

    `save` writes a checkpoint after the first one, and `load` begins after it. With `schedules_itself`, `prepare` does
    not get the scheduler.
    """
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        deepspeed_plugin=None if plugin is None else DeepSpeedPlugin(**plugin),
    )
    *made, scheduler = _made(dummies)
    if schedules_itself:
        model, optimizer, loader = accelerator.prepare(*made)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(*made, scheduler)
    losses: list[float] = []
    if load:
        accelerator.load_state(load)
    for epoch in range(1 if load else 0, epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs).float(), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if save and epoch == 0:
            accelerator.save_state(save)
    whole = accelerator.get_state_dict(model) if _gathers(plugin) else {}
    inner = accelerator.unwrap_model(model)
    watched = any(type(hook).__module__ == "accel_torch.misuse" for hook in model._forward_pre_hooks.values())
    if accelerator.is_main_process:
        weights = {name: list(value.shape) for name, value in whole.items()}
        told = {"losses": losses, "weights": weights, "watched": watched}
        told |= {"model": type(model).__name__, "inner": type(inner).__name__}
        print("RESULT " + json.dumps(told), flush=True)


def _gathers(plugin: dict[str, Any] | None) -> bool:
    divided = plugin is not None and plugin.get("zero_stage") == 3
    return not divided or bool(plugin and plugin.get("zero3_save_16bit_model"))


def _made(dummies: bool) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 8, generator=generator)
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4)
    if dummies:
        stand_in = DummyOptim(model.parameters(), lr=1e-2)
        return model, stand_in, loader, DummyScheduler(stand_in, warmup_num_steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, loader, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
