"""Finds the micro-batch size of a model whose passes have collectives; run by tests. The second rank has less memory.

micro_batch_script.py FOLDER LIMIT KIND
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_torch import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    find_micro_batch_size,
)

KINDS: dict[str, Any] = {
    "sharded": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(2)},
    "static": lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]},
}


def main(folder: str, limit: str, kind: str) -> None:
    warnings.filterwarnings("ignore")
    accelerator = Accelerator(cpu=True, project_dir=folder, **KINDS[kind]())
    model, optimizer = nn.Linear(8, 8), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(size: int) -> None:
        if accelerator.process_index == 1:
            with Path(folder, "tried").open("a") as file:
                file.write(f"{size}\n")
            if size > int(limit):
                # The other rank waits for the parameters or gradients of this one.
                raise torch.OutOfMemoryError("CUDA out of memory.")
        accelerator.backward(model(torch.ones(size, 8)).sum())

    plan = find_micro_batch_size(step, global_batch_size=8, accelerator=accelerator, deadline=60)
    Path(folder, f"found_{accelerator.process_index}").write_text(f"{plan.size} {plan.trials}")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
