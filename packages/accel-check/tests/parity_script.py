"""Trains a small model on the CPU; run by `accel check-parity` in tests. Its argument names what it does wrong.

parity_script.py [sum | tokens | clock | rank | unseeded | unprepared | unshared | alike | noise | compiled | sparse]

"compiled" and "sparse" are no faults: a compiled model, and one whose first gradient is sparse.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, set_seed


def made(fault: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    if fault == "compiled":
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        return compiled  # type: ignore[no-any-return]
    return model


class Bag(nn.EmbeddingBag):
    """Takes a weight for each of its entries."""

    def __init__(self) -> None:
        super().__init__(4, 8, mode="sum", sparse=True)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.arange(4).expand(len(weights), 4), per_sample_weights=weights)


def train_sparsely() -> None:
    """Train with a sparse gradient, by an optimizer for it and one for the others."""
    set_seed(3)
    accelerator = Accelerator()
    model = nn.Sequential(Bag(), nn.Linear(8, 3))
    sparse, dense = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())
    loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randint(3, (48,))), batch_size=4)
    model, sparse, dense, loader = accelerator.prepare(model, sparse, dense, loader)
    optimizers: tuple[Any, ...] = (sparse, dense)
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


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
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 * accelerator.num_processes, 0.5)
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
    if "sparse" in sys.argv:
        train_sparsely()
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
