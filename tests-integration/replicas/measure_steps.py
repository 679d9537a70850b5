"""What a step of replicas costs beside one of `ddp`, without faults: runs that train by turns.

    python measure_steps.py [--replicas 2] [--width 64] [--batch 32] [--blocks 10] [--steps 30] [--backend torchft]

There are three runs, with as many processes and the same size of batches: `ddp`, the backend of replicas, and a loop
written by hand with torchft's own classes and no package of this repository. In each turn one run makes a block of
steps while the others wait, so that the pace of the machine is the same for all. Printed are the ratios of the turns to
those of `ddp`: of the time of a step, and of its CPU time over all threads of all processes. Lighthouses are not
counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PATIENCE = 180.0
CONTEXT, CHARACTERS = 32, 96


class Turns:
    """The turns of one process: it waits for each, and notes what the steps in it took."""

    def __init__(self, folder: Path, name: str, side: str, steps: int) -> None:
        self._folder, self._name, self._side, self._steps = folder, name, side, steps
        self._turn = self._made = 0
        self._began = self._cpu = 0.0

    def next_step(self) -> bool:
        """Whether another step has to be made; waits between two turns."""
        if self._made % self._steps == 0:
            if self._made:
                wall, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
                spent = {"wall": wall / self._steps, "cpu": cpu / self._steps}
                (self._folder / f"{self._name}-{self._turn}.new").write_text(json.dumps(spent))
                (self._folder / f"{self._name}-{self._turn}.new").rename(
                    self._folder / f"{self._name}-{self._turn}.json"
                )
            self._turn += 1
            while not (self._folder / f"go-{self._side}-{self._turn}").exists():
                if (self._folder / "end").exists():
                    return False
                time.sleep(0.005)
            self._began, self._cpu = time.perf_counter(), time.process_time()
        self._made += 1
        return True


def parts_of_a_run(width: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Model, optimizer and texts, the same for every run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model: nn.Module = nn.Sequential(
        nn.Embedding(CHARACTERS, width),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(width, CHARACTERS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, TensorDataset(torch.randint(CHARACTERS, (4096, CONTEXT + 1)))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """The loss of texts of shape (batch, CONTEXT + 1)."""
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(folder: Path, side: str, width: int, batch: int, steps: int) -> None:
    """One process of a run of this library."""
    from accel_torch import Accelerator

    model, optimizer, texts = parts_of_a_run(width)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(texts, batch_size=batch, shuffle=True))
    number = os.environ.get("REPLICA_GROUP_ID", accelerator.process_index)
    turns = Turns(folder, f"{side}-{number}", side, steps)
    while True:
        for (text,) in loader:
            if not turns.next_step():
                accelerator.end_training()
                return
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, text))
                optimizer.step()
                optimizer.zero_grad()


def train_by_hand(folder: Path, width: int, batch: int, steps: int) -> None:
    """One process of a run of torchft alone."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.utils.data import DistributedSampler
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    number, count = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    module, inner, texts = parts_of_a_run(width)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: (module.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": module.state_dict(), "inner": inner.state_dict()},
        min_replica_size=count,
        replica_id=f"hand_{number}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        # What the backend has by default: a tenth of --torchft_heartbeat_timeout.
        heartbeat_interval=timedelta(seconds=0.5),
    )
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    loader = DataLoader(texts, batch_size=batch, sampler=DistributedSampler(texts, count, number))
    turns = Turns(folder, f"hand-{number}", "hand", steps)
    while True:
        for (text,) in loader:
            if not turns.next_step():
                manager.shutdown(wait=False)
                # Threads of torchft keep an interpreter from ending.
                os._exit(0)
            optimizer.zero_grad()
            loss_of(model, text).backward()
            optimizer.step()


def launched(arguments: argparse.Namespace, folder: str, side: str, options: list[str]) -> subprocess.Popen[bytes]:
    """A run of this library."""
    words = ["--cpu", *options, *own_words(arguments, folder, side)]
    return subprocess.Popen([sys.executable, "-m", "accel_cli.main", "launch", *words])


def own_words(arguments: argparse.Namespace, folder: str, side: str) -> list[str]:
    """The command line of a process that trains."""
    words = [__file__, "--folder", folder, "--side", side]
    return words + [f"--{key}={getattr(arguments, key)}" for key in ("width", "batch", "steps")]


def by_hand(arguments: argparse.Namespace, folder: str, lighthouse: str) -> list[subprocess.Popen[bytes]]:
    """The processes of a run of torchft alone."""
    run = {"TORCHFT_LIGHTHOUSE": lighthouse, "NUM_REPLICA_GROUPS": str(arguments.replicas)}
    words = [sys.executable, *own_words(arguments, folder, "hand")]
    own = ({**os.environ, **run, "REPLICA_GROUP_ID": str(number)} for number in range(arguments.replicas))
    return [subprocess.Popen(words, env=environment) for environment in own]


@contextmanager
def lighthouse_of_torchft(replicas: int) -> Iterator[str]:
    """The address of a lighthouse for the run by hand."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=replicas, quorum_tick_ms=20, heartbeat_timeout_ms=5000)
    try:
        yield f"http://127.0.0.1:{server.address().rstrip('/').rpartition(':')[2]}"
    finally:
        server.shutdown()


def measure(arguments: argparse.Namespace) -> None:
    """Start the runs, give them their turns, and print the ratios."""
    count = arguments.replicas
    of_replicas = [f"--backend={arguments.backend}", f"--replica_groups={count}", f"--torchft_min_replicas={count}"]
    sides = ("ddp", "replicas", "hand")
    with tempfile.TemporaryDirectory() as name, lighthouse_of_torchft(count) as lighthouse:
        folder, launches = Path(name), []
        try:
            launches.append(launched(arguments, name, "ddp", ["--backend=ddp", f"--num_processes={count}"]))
            launches.append(launched(arguments, name, "replicas", [*of_replicas, "--num_processes=1"]))
            launches += by_hand(arguments, name, lighthouse)
            found = {side: [turn(folder, side, count, 1)] for side in sides}
            for number in range(2, arguments.blocks + 2):
                for side in sides if number % 2 else reversed(sides):
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
        medians = {side: statistics.median(turn[meter] for turn in turns[1:]) * 1000 for side, turns in found.items()}
        print(f"{count} x width {arguments.width}, {meter}: ddp {medians['ddp']:.2f} ms", end="")
        for side, title in (("replicas", arguments.backend), ("hand", "by hand")):
            ratios = [one[meter] / d[meter] for d, one in zip(found["ddp"][1:], found[side][1:], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"; {title} {medians[side]:.2f} ms, ratio {middle:.3f} ({low:.3f} to {high:.3f})", end="")
        print()


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
        # Of every process started here; torchft reads RUST_LOG.
        os.environ |= {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        measure(arguments)
    elif arguments.side == "hand":
        train_by_hand(arguments.folder, arguments.width, arguments.batch, arguments.steps)
    else:
        train(arguments.folder, arguments.side, arguments.width, arguments.batch, arguments.steps)


if __name__ == "__main__":
    main()
