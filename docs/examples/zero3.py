"""DeepSpeed: the same loop, with parameters, gradients and states divided by ZeRO stage 3.

pip install "accel-torch[deepspeed]"
accel launch --cpu --num_processes 2 zero3.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.deepspeed.config import DeepSpeedPlugin
from accel_torch import Accelerator, set_seed


def main():
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, zero3_save_16bit_model=True)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    set_seed(0)
    inputs = torch.randn(256, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    # Model and optimizer in one call.
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))

    losses = []
    for _ in range(6):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            # The engine clips and steps within backward; the lines of the loop stay.
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.save_state("runs/zero3")
    accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    accelerator.print("learned:", losses[-1] < losses[0] / 4)
    accelerator.end_training()


if __name__ == "__main__":
    main()
