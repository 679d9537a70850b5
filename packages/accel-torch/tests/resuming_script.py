"""A training script that resumes by itself; run by tests, which end or kill its processes at some step.

    resuming_script.py FOLDER STEPS [how rank step [attempt]]

FOLDER takes the checkpoints, and the losses of each process by step. `how` is "term", "usr1" or "kill".
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, DataLoaderConfiguration, ProjectConfiguration

SIGNALS = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "kill": signal.SIGKILL}


class Progress:
    """Counts steps; registered for checkpoints."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main(folder: str, steps: str, how: str = "", rank: str = "-1", at: str = "-1", attempt: str = "0") -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(3)
    project = ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, total_limit=3, save_on_signal=how != "kill", fsync=False
    )
    accelerator = Accelerator(
        cpu=True,
        project_config=project,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(restore_position=True),
    )
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, batch_size=4, shuffle=True)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state(missing_ok=True)
    mine = accelerator.process_index == int(rank) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == attempt
    with Path(folder, f"losses_{accelerator.process_index}").open("a", buffering=1) as log:
        while progress.step < int(steps):
            for inputs, targets in loader:
                if mine and progress.step == int(at):
                    os.kill(os.getpid(), SIGNALS[how])
                if how == "term" and progress.step >= int(at):
                    # A step takes so long that the processes agree before the last one.
                    time.sleep(0.25)
                with accelerator.accumulate(model):
                    loss = (model(inputs) - targets).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                progress.step += 1
                log.write(f"{progress.step} {loss.item()!r}\n")
                if progress.step >= int(steps):
                    break
                if how == "kill" and progress.step % 5 == 0:
                    accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
