"""Trains a small model with automatic checkpoints; options plant a kill, a bad batch, or a fault that comes once."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, ProjectConfiguration, set_seed
from accel_tracking.record import RECORD

parser = argparse.ArgumentParser()
parser.add_argument("--project_dir")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--kill_at", type=int, default=-1)
parser.add_argument("--bad_sample", type=int, default=-1)
parser.add_argument("--fault_at", type=int, default=-1, help="a fault of the machine, which comes once")
parser.add_argument("--random", action="store_true", help="draw from a generator that nothing seeds")
parser.add_argument("--hf_token")
options = parser.parse_args()

set_seed(options.seed)
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(options.project_dir, automatic_checkpoint_naming=True, total_limit=20),
)
project = Path(accelerator.project_dir or ".")
features = torch.linspace(0, 1, options.samples * 4).reshape(-1, 4)
if options.bad_sample >= 0:
    features[options.bad_sample] = float("inf")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=options.lr), DataLoader(TensorDataset(features), 4)
)
accelerator.init_trackers("recorded", config=vars(options))
loaded = accelerator.load_state(missing_ok=True)
step = int(loaded.rpartition("_")[2]) + 1 if loaded else 0
source = torch.Generator()
source.seed()
for (batch,) in accelerator.skip_first_batches(loader, step):
    step += 1
    marker = project / "fault"
    if step == options.fault_at and not marker.exists() and "ACCEL_REPEATED_RUN" not in os.environ:
        marker.touch()
        batch = batch * float("nan")
    noise = torch.rand((), generator=source) if options.random else torch.rand(())
    loss = (model(batch) + noise).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step=step)
    accelerator.save_state()
    if step == options.kill_at and not (project / "killed").exists() and accelerator.process_index == 0:
        # A thread writes the record.
        while not (project / RECORD).exists():
            time.sleep(0.01)
        (project / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
accelerator.end_training()
