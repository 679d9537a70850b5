"""Mistakes that type checkers have to find; `test_static_types.py` counts them."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD

from accel_torch import Accelerator


def mistakes(accelerator: Accelerator, model: nn.Linear, optimizer: SGD) -> None:
    one: SGD = accelerator.prepare(model)
    two, three, four = accelerator.prepare(model, optimizer)
    five: tuple[SGD, nn.Linear] = accelerator.prepare(model, optimizer)
    accelerator.prepare(model, device_placement=True)
    print(one, two, three, four, five)
