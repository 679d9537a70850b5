"""What a replica of the tests runs: trains until the epoch that a file names, and notes the samples of each step.

    train_replica.py FOLDER SAMPLES PAUSE [SAVE_EVERY DEVICE DTYPE]

With SAVE_EVERY above 0, each replica saves a checkpoint after so many steps and takes up its newest one when it starts.
An attempt of a step is noted before its gradients leave in backward, so that nothing is missing of a replica that is
killed when the others have them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, ProjectConfiguration
from accel_torchft.elastic import share_of_batch

BATCH = 4


def data(samples: int, dtype: torch.dtype) -> TensorDataset:
    """(id, inputs, class) of each sample."""
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 16, generator=drawn).to(dtype)
    return TensorDataset(torch.arange(samples), inputs, torch.randint(0, 4, (samples,), generator=drawn))


def model_and_optimizer(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What every run begins with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def last_epoch(folder: Path) -> float:
    """The number of epochs, once the test knows it."""
    try:
        return int((folder / "epochs").read_text())
    except FileNotFoundError:
        return float("inf")


def main(
    folder: Path,
    samples: int,
    pause: float,
    save_every: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train."""
    torch.set_num_threads(1)
    if device == "simulated":
        from accel_testing.simulated_device import MODULE

        MODULE.plug_in(1, 2**30)
        # torchft orders work on the streams of an accelerator, and a device that is written in Python has none.
        torch.accelerator.is_available = lambda: False
    own = str(folder / f"checkpoints-{os.environ['REPLICA_GROUP_ID']}")
    project = ProjectConfiguration(project_dir=own, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=device == "cpu", project_config=project if save_every else None)
    name = f"{os.environ['REPLICA_GROUP_ID']}-{accelerator.process_index}"
    model, optimizer, loader = accelerator.prepare(
        *model_and_optimizer(dtype), DataLoader(data(samples, dtype), batch_size=BATCH, shuffle=True)
    )
    if save_every:
        accelerator.load_state(missing_ok=True)
    with open(folder / f"{name}-{os.getpid()}.jsonl", "a", buffering=1) as file:

        def note(**row: Any) -> None:
            file.write(json.dumps({**row, "time": time.time()}) + "\n")

        note(ready=os.getpid(), device=str(accelerator.device))
        for epoch in itertools.count(loader.iteration):
            if epoch >= last_epoch(folder):
                break
            ids: list[int] = []
            total = 0.0
            for index, inputs, targets in loader:
                with accelerator.accumulate(model):
                    share = share_of_batch(loader)
                    assert share is not None
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    ids += index.tolist()[: share.samples]
                    total += loss.item() * share.samples
                    if accelerator.sync_gradients:
                        note(attempt=share.step, epoch=epoch, members=share.members, ids=ids, loss=total)
                        ids, total = [], 0.0
                    accelerator.backward(loss)
                    optimizer.step()
                    if accelerator.sync_gradients and not optimizer.step_was_skipped:
                        note(step=share.step, members=share.members)
                        if save_every and share.step % save_every == save_every - 1:
                            accelerator.save_state()
                            note(saved=share.step)
                    optimizer.zero_grad()
                time.sleep(pause)
        unwrapped = accelerator.unwrap_model(model)
        with accelerator.global_weights(model):
            weights = torch.cat(
                [getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in unwrapped.parameters()]
            ).cpu()
        note(end=hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    torch.save(weights, folder / f"weights-{name}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    where, size, wait, *rest = sys.argv[1:]
    every, kind, precision = rest or ("0", "cpu", "float32")
    main(Path(where), int(size), float(wait), int(every), kind, getattr(torch, precision))
