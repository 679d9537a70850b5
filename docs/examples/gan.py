"""A GAN: two models and two optimizers in one loop, on any number of processes.

accel launch --cpu --num_processes 2 gan.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from accel_torch import Accelerator, set_seed

NOISE = 4


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def main(steps=300):
    accelerator = Accelerator()
    set_seed(0)
    # Points on a circle of radius 2.
    angles = torch.rand(1024) * 2 * torch.pi
    points = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)

    generator, critic = layers(NOISE, 2), layers(2, 1)
    makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, critic, makes, judges, loader = accelerator.prepare(
        generator, critic, makes, judges, DataLoader(points, batch_size=64, shuffle=True)
    )
    set_seed(1, device_specific=True)  # other noise on each process

    done = 0
    while done < steps:
        for real in loader:
            noise = torch.randn(len(real), NOISE, device=real.device)
            with torch.no_grad():
                made = generator(noise)
            # Real and made points in one forward: the critic's gradients are averaged once for each step.
            answers = critic(torch.cat([real, made]))
            truth = torch.cat([torch.ones_like(answers[: len(real)]), torch.zeros_like(answers[len(real) :])])
            accelerator.backward(binary_cross_entropy_with_logits(answers, truth))
            judges.step()
            judges.zero_grad()

            # The critic is frozen: its gradients would be computed and averaged for nothing.
            critic.requires_grad_(False)
            answers = accelerator.unwrap_model(critic)(generator(noise))
            accelerator.backward(binary_cross_entropy_with_logits(answers, torch.ones_like(answers)))
            makes.step()
            makes.zero_grad()
            critic.requires_grad_(True)
            done += 1
            if done == steps:
                break

    with torch.no_grad():
        made = accelerator.unwrap_model(generator)(torch.randn(256, NOISE, device=accelerator.device))
        radius = accelerator.gather(made.norm(dim=1)).mean().item()
    accelerator.print(f"mean radius {radius:.1f}, wanted 2.0")
    accelerator.print("close:", abs(radius - 2) < 1)


if __name__ == "__main__":
    main()
