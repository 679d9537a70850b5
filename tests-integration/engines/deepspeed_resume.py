"""Trains a small model under DeepSpeed, saves on the way, and goes on at the newest checkpoint.

    deepspeed_resume.py FOLDER [--stage 3] [--kill_at 8] [--load CHECKPOINT] [--universal] ...

The first process appends the loss of each step to `FOLDER/losses`, and writes the final weights and states of the
optimizer, whole and in 32 bits, to `FOLDER/final.pt`.
"""

from __future__ import annotations

import os
import signal
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.nn import Dropout, Linear, Module, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.deepspeed.config import DeepSpeedPlugin
from accel_torch import Accelerator, DataLoaderConfiguration, ProjectConfiguration

SAMPLES, SAVE_EVERY = 96, 3


def whole_state(model: Module) -> dict[str, torch.Tensor]:
    """Weights and states of the optimizer, whole; called on every process."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def started(told: Namespace) -> Accelerator:
    """The Accelerator of a run."""
    # Without a threshold, stage 3 divides parameters as small as these, too.
    zero = {"stage": told.stage, "stage3_param_persistence_threshold": 0}
    table: dict[str, Any] = {"zero_optimization": zero, "gradient_clipping": 1.0}
    if told.universal:
        table["checkpoint"] = {"load_universal": True}
    return Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=table),
        project_config=ProjectConfiguration(told.folder, automatic_checkpoint_naming=True),
        # Batches of all processes together: then the schedule does not depend on their number either.
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, restore_position=True, use_seedable_sampler=True, data_seed=5
        ),
    )


def parts(told: Namespace) -> tuple[Any, ...]:
    """Model, optimizer, loader and schedule."""
    torch.manual_seed(0)
    model = Sequential(Linear(8, 16), ReLU(), Dropout(told.dropout), Linear(16, 2))
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=told.batch, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, loader, LambdaLR(optimizer, lambda step: 0.95**step)


def keep(accelerator: Accelerator, model: Module, name: str) -> None:
    """Write the whole state into a file of the folder; called on every process."""
    state = whole_state(model)
    if accelerator.is_main_process:
        torch.save(state, Path(str(accelerator.project_dir), name))


def after_step(accelerator: Accelerator, told: Namespace, step: int, loss: float) -> None:
    """Note the loss, save, and kill the last process where that is wanted."""
    folder = Path(told.folder)
    if accelerator.is_main_process:
        with (folder / "losses").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")
    if step % SAVE_EVERY == 0:
        accelerator.save_state()
    if step == told.kill_at and accelerator.is_last_process and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(told: Namespace) -> None:
    accelerator = started(told)
    model, optimizer, loader, schedule = accelerator.prepare(*parts(told))
    torch.manual_seed(accelerator.process_index)
    if told.load:
        accelerator.load_state(told.load, allow_missing=("random_states",))
        keep(accelerator, model, "loaded.pt")
    else:
        accelerator.load_state(missing_ok=True)
    while model.global_steps < told.steps:
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            after_step(accelerator, told, model.global_steps, accelerator.reduce(loss.detach(), "mean").item())
            if model.global_steps == told.steps:
                break
    keep(accelerator, model, "final.pt")
    accelerator.end_training()


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--kill_at", type=int, default=0)
    parser.add_argument("--load")
    parser.add_argument("--universal", action="store_true")
    main(parser.parse_args())
