"""A script that runs with ours and with the original alike: it saves a checkpoint, or resumes from one.

exchanged_checkpoint.py write|read|write-model|read-model FOLDER KIND
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import DataLoaderConfiguration

warnings.simplefilter("ignore")


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Tied(nn.Module):
    """Two layers that share a weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(16)


def made(accelerator: Accelerator, seed: int) -> tuple[Any, ...]:
    """Two models, two optimizers, a schedule, a loader and a counter."""
    torch.manual_seed(seed)
    models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)), nn.Linear(4, 1)]
    optimizers = [torch.optim.AdamW(models[0].parameters(), 0.05), torch.optim.SGD(models[1].parameters(), 0.1, 0.9)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    loader = DataLoader(TensorDataset(torch.arange(48)), batch_size=4, shuffle=True)
    prepared = accelerator.prepare(*models, *optimizers, scheduler, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return (*prepared, counter)


def train(accelerator: Accelerator, parts: tuple[Any, ...], steps: int) -> list[float]:
    """Losses; inputs and dropout draw from the generator."""
    first, second, adam, sgd, scheduler, _, counter = parts
    losses = []
    for _ in range(steps):
        inputs = torch.randn(8, 4)
        loss = (first(inputs) - second(inputs)).square().mean()
        accelerator.backward(loss)
        for optimizer in (adam, sgd):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        counter.seen += 1
        losses.append(loss.item())
    return losses


def left(accelerator: Accelerator, parts: tuple[Any, ...]) -> list[list[int]]:
    """What an epoch holds after two batches."""
    loader = parts[-2]
    loader.set_epoch(1)
    return [batch.tolist() for (batch,) in accelerator.skip_first_batches(loader, 2)]


def main(task: str, folder: str, kind: str) -> None:
    """Do one task."""
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=11)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    safe = kind.startswith("safe")
    if task.endswith("model"):
        exchange_model(accelerator, task, folder, safe, "1KB" if kind.endswith("sharded") else "10GB")
        return
    parts = made(accelerator, seed=1 if task == "write" else 2)
    expected = Path(folder) / f"expected_{accelerator.process_index}.json"
    batches = expected.with_name(f"batches_{accelerator.process_index}.json")
    if task == "write":
        train(accelerator, parts, 3)
        accelerator.save_state(folder, safe_serialization=safe)
        accelerator.wait_for_everyone()
        expected.write_text(json.dumps(train(accelerator, parts, 4)))
        batches.write_text(json.dumps(left(accelerator, parts)))
    else:
        accelerator.load_state(folder)
        found = train(accelerator, parts, 4)
        # Processors of different makes round differently.
        wanted = torch.tensor(json.loads(expected.read_text()))
        assert torch.allclose(torch.tensor(found), wanted, rtol=1e-5), found
        assert parts[-1].seen == 7
        assert left(accelerator, parts) == json.loads(batches.read_text())
    accelerator.end_training()


def exchange_model(accelerator: Accelerator, task: str, folder: str, safe: bool, limit: str) -> None:
    """Write weights, or compare them with those that were written."""
    torch.manual_seed(3)
    model = Tied()
    if task == "write-model":
        accelerator.save_model(accelerator.prepare(model), folder, max_shard_size=limit, safe_serialization=safe)
        return
    other = Tied()
    load_checkpoint_in_model(other, folder)
    for (name, value), wanted in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, wanted), name


if __name__ == "__main__":
    main(*sys.argv[1:])
