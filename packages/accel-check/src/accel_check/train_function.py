"""The script that `accel_check.parity` and `accel_check.resume` run: it calls a test's function with its batches.

train_function.py BATCHES FILE FUNCTION
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from accel_check.batches import widened
from accel_torch import Accelerator, DataLoaderConfiguration

__all__ = ("GlobalBatches", "main", "samples_of")


class GlobalBatches(Dataset[Any]):
    """A data set of the samples of global batches, in order.

    Args:
        batches: pytrees of tensors of shape (batch size, ...); all of one batch size.
    """

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self.size = samples_of(batches[0])

    def __len__(self) -> int:
        return self.size * len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return _row(self._batches[index // self.size], index % self.size)


def samples_of(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    return samples_of(values[0])


def _row(batch: Any, index: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[index]
    if isinstance(batch, dict):
        return {name: _row(value, index) for name, value in batch.items()}
    return tuple(_row(value, index) for value in batch)


def _function(file: str, name: str) -> Any:
    """Load a function from a file that need not be importable by name."""
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part)
    return function


def main(batches: str, file: str, name: str) -> None:
    """Call a function with an Accelerator and with this process's shards of the global batches."""
    step = _function(file, name)
    data = GlobalBatches(widened(torch.load(batches, weights_only=False)))
    # A resumed function goes on where it was saved.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(restore_position=True))
    count = accelerator.session.strategy.shards().count
    step(accelerator, accelerator.prepare(DataLoader(data, batch_size=data.size // count)))


if __name__ == "__main__":
    main(*sys.argv[1:])
