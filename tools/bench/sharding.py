"""Preparing and training a model of 200 blocks that is sharded by FSDP2 over two processes over gloo.

"Raw" calls `fully_shard` for each block and for the model; the original runs DDP when it is asked for FSDP on a CPU, so
it is not in the table. Each is measured in interpreters of its own, in turn, five times, after it prepared a model of
one layer; shown are the medians. Memory is what the process grew by at most, from before the model was built until it
had trained.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TURNS, BLOCKS, WIDTH, STEPS = 5, 200, 256, 8
LIMIT = 1.3

CASES = {
    "prepare": ("FSDP2 prepare, 200 blocks, 2 processes", "CPU ms"),
    "step": ("FSDP2 training step, 200 blocks, 2 processes", "CPU ms"),
    "memory": ("FSDP2 peak memory, 200 blocks, 2 processes", "MiB"),
}


def build() -> Any:
    """The model; its blocks are of a class of their own."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inwards, self.outwards = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Any) -> Any:
            return inputs + self.outwards(self.inwards(inputs).relu())

    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def small(name: str) -> tuple[Any, Any]:
    """A model of one block, of a class of that name, and its optimizer."""
    import torch

    block = type(name, (torch.nn.Linear,), {})(2, 2)
    model = torch.nn.Sequential(block)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def prepared_by_us(model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    """Prepare by the Accelerator; returns model, optimizer and how to go backward."""
    from accel_torch import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.prepare(*small("Block"))
    began = time.process_time()
    model, optimizer = accelerator.prepare(model, optimizer)
    SPENT["prepare"] = (time.process_time() - began) * 1000
    return model, optimizer, accelerator.backward


def prepared_by_hand(model: Any, optimizer: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    """The same with torch alone."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(small("Block")[0], mesh=mesh)
    began = time.process_time()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    SPENT["prepare"] = (time.process_time() - began) * 1000
    return model, optimizer, lambda loss: loss.backward()


SPENT: dict[str, float] = {}


def child(kind: str) -> None:
    """Measure one way in one of two processes, and print what the first found."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard  # noqa: F401 - both import it before anything is measured

    before = _grown()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, backward = (prepared_by_us if kind == "ours" else prepared_by_hand)(model, optimizer)
    inputs = torch.randn(8, WIDTH)

    def step() -> None:
        backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    steps = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        steps.append((time.process_time() - began) * 1000)
    SPENT["step"] = min(steps)
    SPENT["memory"] = _grown() - before
    if dist.get_rank() == 0:
        print(json.dumps(SPENT), flush=True)
    dist.destroy_process_group()


def _grown() -> float:
    """The most memory this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def group(kind: str) -> dict[str, float]:
    """What two processes measured."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *launch, __file__, "--child", kind]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, timeout=300)
    found: dict[str, float] = json.loads(next(line for line in shown.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--child", choices=("ours", "raw"))
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    turns = [{kind: group(kind) for kind in ("ours", "raw")} for _ in range(TURNS)]
    for name, (case, unit) in CASES.items():
        median = {kind: statistics.median(turn[kind][name] for turn in turns) for kind in ("ours", "raw")}
        print(
            json.dumps(
                {"case": case, "unit": unit, **median, "peer": None, "figure": "ours/raw", "limit": LIMIT},
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
