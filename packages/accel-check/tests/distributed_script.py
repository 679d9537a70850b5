"""Trains a model that the script distributes itself before it prepares it."""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, set_seed


def main(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    if accelerator.num_processes > 1:
        mesh = init_device_mesh("cpu", (accelerator.num_processes,), mesh_dim_names=("all",))
        if kind == "tensors":
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for inputs, targets in loader:
        accelerator.backward((model(inputs) - targets).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
