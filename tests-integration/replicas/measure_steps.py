"""What a step of replicas costs beside one of `ddp`, without faults: two runs that train by turns.

    python measure_steps.py [--replicas 2] [--width 64] [--batch 32] [--blocks 10] [--steps 30] [--backend torchft]

Both runs have as many processes and the same batches. In each turn one makes a block of steps while the other waits,
so that the pace of the machine is the same for both. Printed are the ratios of the turns: of the time of a step, and of
its CPU time over all threads of all processes. The lighthouse is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE = 180.0
CONTEXT, CHARACTERS = 32, 96


def train(folder: Path, side: str, width: int, batch: int, steps: int) -> None:
    """One process of a run: trains in its turns and notes what each took."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from accel_torch import Accelerator

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model: nn.Module = nn.Sequential(
        nn.Embedding(CHARACTERS, width),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(width, CHARACTERS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = torch.randint(CHARACTERS, (4096, CONTEXT + 1))
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(texts), batch_size=batch, shuffle=True)
    )
    name = f"{side}-{os.environ.get('REPLICA_GROUP_ID', accelerator.process_index)}"
    turn, made = 0, 0
    began = cpu = 0.0
    while True:
        for (text,) in loader:
            if made % steps == 0:
                if made:
                    spent = {"wall": (time.perf_counter() - began) / steps, "cpu": (time.process_time() - cpu) / steps}
                    (folder / f"{name}-{turn}.new").write_text(json.dumps(spent))
                    (folder / f"{name}-{turn}.new").rename(folder / f"{name}-{turn}.json")
                turn += 1
                while not (folder / f"go-{side}-{turn}").exists():
                    if (folder / "end").exists():
                        accelerator.end_training()
                        return
                    time.sleep(0.005)
                began, cpu = time.perf_counter(), time.process_time()
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            made += 1


def measure(arguments: argparse.Namespace) -> None:
    """Start both runs, give them their turns, and print the ratios."""
    count = arguments.replicas
    runs = {
        "ddp": ["--backend=ddp", f"--num_processes={count}"],
        "replicas": [
            f"--backend={arguments.backend}",
            f"--replica_groups={count}",
            f"--torchft_min_replicas={count}",
            "--num_processes=1",
        ],
    }
    with tempfile.TemporaryDirectory() as name:
        folder, launches = Path(name), []
        try:
            for side, options in runs.items():
                words = ["--cpu", *options, __file__, "--folder", name, "--side", side]
                words += [f"--{key}={getattr(arguments, key)}" for key in ("width", "batch", "steps")]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                launches.append(
                    subprocess.Popen([sys.executable, "-m", "accel_cli.main", "launch", *words], env=environment)
                )
            found = {side: [turn(folder, side, count, number) for number in (1,)] for side in runs}
            for number in range(2, arguments.blocks + 2):
                for side in runs if number % 2 else reversed(runs):
                    found[side].append(turn(folder, side, count, number))
        finally:
            (folder / "end").touch()
            for launch in launches:
                try:
                    launch.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    launch.terminate()
                    launch.wait()
    for meter in ("wall", "cpu"):
        ratios = [r[meter] / d[meter] for d, r in zip(found["ddp"][1:], found["replicas"][1:], strict=True)]
        medians = {side: statistics.median(turn[meter] for turn in turns[1:]) * 1000 for side, turns in found.items()}
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{count} x width {arguments.width}, {meter}: ddp {medians['ddp']:.2f} ms, {arguments.backend} "
            f"{medians['replicas']:.2f} ms, ratio {middle:.2f} ({low:.2f} to {high:.2f})"
        )


def turn(folder: Path, side: str, count: int, number: int) -> dict[str, float]:
    """Let a side make its steps: seconds of the slowest process, and CPU seconds of all."""
    (folder / f"go-{side}-{number}").touch()
    paths = [folder / f"{side}-{process}-{number}.json" for process in range(count)]
    deadline = time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{side} does not end its turn {number}")
        time.sleep(0.01)
    spent = [json.loads(path.read_text()) for path in paths]
    return {"wall": max(one["wall"] for one in spent), "cpu": sum(one["cpu"] for one in spent)}


def main() -> None:
    """Measure, or train where a folder is given."""
    parser = argparse.ArgumentParser()
    for name, default in (("replicas", 2), ("width", 64), ("batch", 32), ("blocks", 10), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="torchft")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--side", default="")
    arguments = parser.parse_args()
    if arguments.folder is None:
        measure(arguments)
    else:
        train(arguments.folder, arguments.side, arguments.width, arguments.batch, arguments.steps)


if __name__ == "__main__":
    main()
