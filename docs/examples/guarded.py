"""A classifier with one damaged sample: the guard leaves its step out, names it, and the run goes on.

    accel launch --cpu --num_processes 2 guarded.py --steps 200

Start it again with the same arguments after an interruption: it continues where it was.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, DataLoaderConfiguration, ProjectConfiguration, StepGuard, set_seed

DAMAGED = 1234


def data():
    """Points of three clouds; one point is not a number."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (4096,), generator=generator)
    points = nn.functional.one_hot(targets, 8).float() + torch.randn(4096, 8, generator=generator)
    points[DAMAGED, 0] = float("nan")
    return TensorDataset(points, targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="runs/guarded")
    arguments = parser.parse_args()

    accelerator = Accelerator(
        log_with="jsonl",
        project_config=ProjectConfiguration(arguments.output, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1, restore_position=True),
        kwargs_handlers=[StepGuard(nonfinite="skip")],
    )
    accelerator.init_trackers("guarded", config=vars(arguments))
    set_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(data(), batch_size=16, shuffle=True)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state(missing_ok=True)

    while progress.steps < arguments.steps:
        for points, targets in loader:
            loss = nn.functional.cross_entropy(model(points), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.steps += 1
            if accelerator.optimizer_step_was_skipped:
                progress.skipped += 1
            elif progress.steps % 10 == 0:
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.log({"loss": mean}, step=progress.steps)
                accelerator.print(f"step {progress.steps}: loss {mean:.2f}")
            if progress.steps % 40 == 0:
                accelerator.save_state()
            if progress.steps == arguments.steps:
                break
    for event in accelerator.guard.events:
        accelerator.print(f"step {event.step}: {event.kind}, {event.action}, samples {event.samples}")
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    accelerator.print(f"one step left out, weights finite: {progress.skipped == 1 and finite}")
    accelerator.end_training()


class Progress:
    """What the loop counts, saved with each checkpoint."""

    def __init__(self):
        self.steps = self.skipped = 0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


if __name__ == "__main__":
    main()
