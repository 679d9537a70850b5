"""Trains a small network through the Accelerator and prints what can be compared, as JSON.

PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python xla_run.py '{"fsdp": true}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_plugins.xla.config import XLAPlugin
from accel_state import current
from accel_state.errors import AccelError
from accel_torch import Accelerator, set_seed


class Block(nn.Module):
    """A layer that gives a dict, as those of transformers do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": torch.tanh(self.inner(inputs))}


class Network(nn.Module):
    """Two blocks whose input and output layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.drop = nn.Dropout(0.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(n, 8) to (n, 8)."""
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)["hidden"]
        answer: torch.Tensor = self.last(self.drop(hidden))
        return answer


class Failing(IterableDataset[Any]):
    """Gives three samples and fails."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(3):
            yield torch.full((8,), float(number)), torch.tensor(number)
        raise ValueError("the fourth sample is broken")


def data(samples: int = 21) -> TensorDataset:
    """Inputs (n, 8) and labels; the last batch of four is smaller."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, 8, generator=generator), torch.randint(8, (samples,), generator=generator)
    )


def train(told: dict[str, Any]) -> dict[str, Any]:
    """Train as `told` says, and tell how it went."""
    if told.get("seed_first"):
        set_seed(0)
    names = ("fsdp", "blocks", "prefetch", "downcast_bf16")
    plugin = XLAPlugin(**{name: told[name] for name in names if name in told})
    accelerator = Accelerator(
        mixed_precision=told.get("precision", "no"),
        gradient_accumulation_steps=told.get("accumulation", 1),
        kwargs_handlers=[plugin],
    )
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    dataset = Failing() if told.get("failing") else data()
    loader = DataLoader(dataset, batch_size=4, num_workers=told.get("workers", 0))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, ends, seen = [], [], []
    for _ in range(told.get("epochs", 2)):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            ends.append(loader.end_of_dataloader)
            seen.append(len(accelerator.gather_for_metrics(labels)))
    if told.get("saves"):
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    shape = shape_of(accelerator, model, inputs)
    shape["divided"] = sorted({*shape["divided"], *map(sharding, states)})
    return {"losses": losses, "ends": ends, "seen": seen, **shape}


def shape_of(accelerator: Accelerator, model: nn.Module, inputs: torch.Tensor) -> dict[str, Any]:
    """What became of the model, and where things lie."""
    bare = accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(model)
    return {
        "type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "tied": bare.first.weight is bare.last.weight,
        "class": type(bare).__name__,
        "weights": {name: value.float().tolist() for name, value in weights.items()},
        "places": sorted({value.device.type for value in weights.values()}),
        "divided": sorted({sharding(parameter) for parameter in model.parameters()}),
        "batch": sharding(inputs),
    }


def sharding(tensor: torch.Tensor) -> str:
    """How torch_xla divides a tensor; empty when it lies whole on every device."""
    if tensor.device.type != "xla":
        return ""
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def attempt(told: dict[str, Any]) -> dict[str, Any]:
    """What a run comes to, or the error that refuses it."""
    variables = told.get("variables", {})
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        return train(told)
    except (AccelError, ValueError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        # The end of a run puts back the variables that it found.
        current.clear()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print("RESULT " + json.dumps({name: attempt(told) for name, told in cases.items()}))
