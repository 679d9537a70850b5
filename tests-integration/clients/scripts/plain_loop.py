"""What the Trainer does, in plain PyTorch on one process, for engines that the original does not run on a CPU."""

from __future__ import annotations

import json
import sys

import torch
from tiny_text import LENGTH, Texts, tell, tiny_model
from transformers import get_linear_schedule_with_warmup

# The Trainer divides by the number of all words, of which the first is not predicted.
PREDICTED = (LENGTH - 1) / LENGTH


def main(batch: int, steps: int, accumulation: int = 1, bf16: bool = False) -> None:
    model, data = tiny_model(), Texts(96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, steps)
    losses = []
    for step in range(steps):
        total = 0.0
        for part in range(accumulation):
            first = (step * accumulation + part) * batch
            words = data.words[first : first + batch]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(input_ids=words, labels=words).loss * PREDICTED / accumulation
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        words = Texts(22, seed=1).words
        evaluated = model(input_ids=words, labels=words).loss.item() * PREDICTED
    tell(losses=losses, evaluated=evaluated)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
