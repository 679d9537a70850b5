"""A training script that saves every few steps and resumes by itself, in its own pace.

    train.py FOLDER STEPS PACE [RANK AT CODE]

FOLDER takes the checkpoints, and the losses of each rank by step. PACE is the least duration of a step in seconds. The
process RANK ends at step AT with CODE.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, DataLoaderConfiguration, ProjectConfiguration


class Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main(folder: str, steps: str, pace: str, rank: str = "-1", at: str = "-1", code: str = "0") -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(3)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            folder, automatic_checkpoint_naming=True, total_limit=3, save_on_signal=True
        ),
        dataloader_config=DataLoaderConfiguration(restore_position=True),
    )
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.05), DataLoader(data, batch_size=4, shuffle=True)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    # Another number of processes has other generators.
    accelerator.load_state(missing_ok=True, allow_missing=("random_states",))
    with Path(folder, f"losses_{accelerator.process_index}").open("a", buffering=1) as log:
        while progress.step < int(steps):
            for inputs, targets in loader:
                if (accelerator.process_index, progress.step) == (int(rank), int(at)):
                    sys.exit(int(code))
                time.sleep(float(pace))
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                log.write(f"{progress.step} {loss.item()!r}\n")
                if progress.step >= int(steps):
                    break
                if progress.step % 4 == 0:
                    accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
