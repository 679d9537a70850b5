"""Trains a small model on the CPU; run by `accel check-parity` in tests. Its argument names what it does wrong.

parity_script.py [sum | tokens | clock | rank | unseeded | unprepared | unshared | alike | noise | compiled]

"compiled" is no fault.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, set_seed


def made(fault: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    if fault == "compiled":
        compiled: nn.Module = torch.compile(model, backend="aot_eager", fullgraph=True)
        return compiled
    return model


def main(fault: str) -> None:
    if fault != "unseeded":
        set_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    if fault == "unprepared":
        return
    model = made(fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    classes = torch.randint(3, (72,))
    classes[::5] = -100
    data = TensorDataset(torch.randn(72, 4), classes if fault == "tokens" else classes.clamp(min=0))
    given = DataLoader(data, batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, given, scheduler)
    if fault != "alike":
        set_seed(4, device_specific=True)
    for _ in range(3):
        for inputs, targets in given if fault == "unshared" else loader:
            with accelerator.accumulate(model):
                if fault == "clock" and time.time() // (86_400 * 40) % 2:
                    inputs = inputs * 2
                if fault == "noise":
                    inputs = inputs + random.random()
                loss = nn.functional.cross_entropy(
                    model(inputs), targets, reduction="sum" if fault == "sum" else "mean"
                )
                if fault == "rank" and accelerator.process_index == 1:
                    loss = loss * 2
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
