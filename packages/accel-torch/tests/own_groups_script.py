"""A script that makes process groups by itself, before the Accelerator or after its state was given up."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from accel_state import PartialState
from accel_torch import Accelerator

if sys.argv[1] == "before":
    dist.init_process_group("gloo")
accelerator = Accelerator(cpu=True)
assert accelerator.gather(torch.ones(1)).sum().item() == 2
if sys.argv[1] == "afterwards":
    PartialState().destroy_process_group()
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    state.destroy_process_group()
    dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == 2
dist.destroy_process_group()
