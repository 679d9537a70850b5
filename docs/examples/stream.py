"""A stream of lines with DataLoader workers: each line trains once, metrics count each line once.

accel launch --cpu --num_processes 2 stream.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_torch import Accelerator, DataLoaderConfiguration, set_seed

LINES = 203


class Lines(IterableDataset):
    """Lines without a known number, as from a socket or a large file; workers divide them among themselves."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, LINES, step):
            inputs = torch.tensor([number % 7, number % 3, 1.0])
            yield inputs, inputs[:2].sum(0, keepdim=True), number


def main():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    set_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Lines(), batch_size=8, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(8):
        numbers, losses = [], []
        for inputs, targets, number in loader:
            each = (model(inputs) - targets).square().flatten()
            accelerator.backward(each.mean())
            optimizer.step()
            optimizer.zero_grad()
            seen, each = accelerator.gather_for_metrics((number, each.detach()))
            numbers += seen.tolist()
            losses += each.tolist()
        accelerator.print(f"epoch {epoch}: {len(numbers)} lines, loss {sum(losses) / len(losses):.2f}")
    accelerator.print("each line once:", sorted(numbers) == list(range(LINES)))


if __name__ == "__main__":
    main()
