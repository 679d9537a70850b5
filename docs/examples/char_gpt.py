"""A GPT on characters: shuffled windows of a text, warm-up, bf16, clipping, exact resume.

    accel launch --cpu --num_processes 2 char_gpt.py --steps 60

Start it again with the same arguments after an interruption: it continues where it was.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_torch import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
    * 40
)
LETTERS = sorted(set(TEXT))
WINDOW = 32


class Windows(Dataset):
    def __init__(self):
        self.codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])

    def __len__(self):
        return len(self.codes) - WINDOW

    def __getitem__(self, start):
        window = self.codes[start : start + WINDOW + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.mix(self.before(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.think(self.after(x))


class GPT(nn.Module):
    def __init__(self, width=64, depth=2, heads=4):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(WINDOW, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, codes):
        x = self.letters(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="runs/char_gpt")
    arguments = parser.parse_args()

    accelerator = Accelerator(
        mixed_precision="bf16",
        log_with="jsonl",
        project_config=ProjectConfiguration(arguments.output, automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1, restore_position=True),
    )
    accelerator.init_trackers("char_gpt", config=vars(arguments))
    set_seed(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Positions count the batches of all processes; the warm-up takes ten steps.
    warmup = 10 * accelerator.num_processes
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda position: min(1.0, (position + 1) / warmup))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Windows(), batch_size=16, shuffle=True), schedule
    )
    accelerator.load_state(missing_ok=True)

    step, mean = schedule.scheduler.last_epoch // accelerator.num_processes, math.inf
    while step < arguments.steps:
        for codes, following in loader:
            loss = nn.functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.log({"loss": mean}, step=step)
                accelerator.print(f"step {step}: loss {mean:.2f}")
            if step % 20 == 0:
                accelerator.save_state()
            if step == arguments.steps:
                break
    if mean < math.inf:
        accelerator.print(f"better than guessing: {mean < math.log(len(LETTERS))}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
