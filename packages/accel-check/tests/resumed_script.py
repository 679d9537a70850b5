"""Trains a small model on the CPU; run by `accel check-resume` in tests. Its argument names what it does wrong.

resumed_script.py [average | generator | clock | position | unprepared | sharded | tensor-parallel]

With the last two it does nothing wrong, and keeps no average of weights, which are then spread over processes.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    set_seed,
)


def main(fault: str) -> None:
    set_seed(3)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, restore_position=fault != "position")
    options: dict[str, Any] = {}
    if fault == "tensor-parallel":
        options = {
            "parallelism_config": ParallelismConfig(tp_size=2),
            "torch_tp_plugin": TorchTensorParallelPlugin(parallelize_plan={"0": "colwise", "2": "rowwise"}),
        }
    accelerator = Accelerator(cpu=True, dataloader_config=loading, **options)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    average = nn.Linear(8, 1)
    if fault != "average":
        accelerator.register_for_checkpointing(average)
    own = random.Random(None if fault == "clock" else 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(72, 4), torch.randn(72, 1))
    given = DataLoader(data, batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, given, scheduler)
    count = 0
    for _ in range(3):
        for inputs, targets in given if fault == "unprepared" else loader:
            count += 1
            noise = own.random() if fault in ("generator", "clock") else np.random.rand()
            loss = (model(inputs + 0.01 * float(noise)) - targets).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if fault in ("sharded", "tensor-parallel"):
                continue
            with torch.no_grad():
                unwrapped: Any = accelerator.unwrap_model(model)
                last = unwrapped[2]
                for kept, parameter in zip(average.parameters(), last.parameters(), strict=True):
                    kept.lerp_(parameter, 0.1)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
