"""CPU time of loaders: a process's epoch of indices, the first batch after a skip, what a prepared loader adds to each
batch, and a step of a dispatching loader.

Each library is measured in interpreters of its own, ours and the original in turn, three times each; the figure is the
median over those of the median over rounds. "Raw" is the plain loader of the script. Dispatching adds up all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

TURNS, ROUNDS = 3, 5
SAMPLES, BATCH = 1_000_000, 8
STEPS = 200

Library = Any
Measure = Callable[[Library], "float | None"]


class Case(NamedTuple):
    """One line of the table.

    Args:
        name: what is done.
        unit: of what `measure` returns.
        figure: how the numbers are compared.
        limit: the largest value of the figure.
        measure: gives the number for one library; None when there is nothing to do.
        processes: how many take part.
    """

    name: str
    unit: str
    figure: str
    limit: float
    measure: Measure
    processes: int = 1


def cpu(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """CPU seconds of a call, the median over rounds."""
    call()
    seen = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        seen.append(time.process_time() - start)
    return statistics.median(seen)


def drain(batches: Iterator[Any]) -> None:
    """Read to the end."""
    for _ in batches:
        pass


def shard(library: Library, kind: str, processes: int) -> Any:
    """The first process's batches out of those of all."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    sampler: Any = (RandomSampler if kind == "shuffled" else SequentialSampler)(range(SAMPLES))
    size = BATCH * processes if kind == "split" else BATCH
    return library.BatchSamplerShard(BatchSampler(sampler, size, False), processes, 0, split_batches=kind == "split")


def epoch(kind: str, processes: int) -> Measure:
    """Milliseconds for one process's epoch of indices."""

    def measure(library: Library) -> float | None:
        if library is None:
            return None
        batches = shard(library, kind, processes)
        return cpu(lambda: drain(iter(batches))) * 1e3

    return measure


def first_batch(library: Library) -> float | None:
    """Microseconds until the first batch of indices."""
    if library is None:
        return None
    batches = shard(library, "sequential", 4096)
    return cpu(lambda: next(iter(batches)), 50) * 1e6


def numbers(kind: str, length: int) -> Any:
    """A data set or stream whose samples cost next to nothing."""
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(length))

    return Stream() if kind == "stream" else range(length)


def skip(kind: str) -> Measure:
    """Milliseconds until the first batch after nine tenths of 200,000 samples were skipped."""

    def measure(library: Library) -> float | None:
        from torch.utils.data import DataLoader

        if library is None:
            return None
        shuffle = True if kind == "shuffled" else None
        plain: Any = DataLoader(numbers(kind, 200_000), batch_size=BATCH, collate_fn=len, shuffle=shuffle)
        loader = library.prepare_data_loader(plain)
        return cpu(lambda: next(iter(library.skip_first_batches(loader, 22_500)))) * 1e3

    return measure


def per_batch(leaves: int) -> Measure:
    """Microseconds for one batch that is there already."""

    def measure(library: Library) -> float:
        import torch
        from torch.utils.data import DataLoader

        tensor = torch.zeros(4)
        batch: Any = tensor if leaves == 1 else {str(index): torch.zeros(4) for index in range(leaves)}
        loader: Any = DataLoader(range(20_000), batch_size=1, collate_fn=lambda samples: batch)  # type: ignore[arg-type]
        if library is not None:
            loader = library.prepare_data_loader(loader, put_on_device=True, device=torch.device("cpu"))
        return cpu(lambda: drain(iter(loader))) / 20_000 * 1e6

    return measure


def dispatch(library: Library) -> float | None:
    """CPU milliseconds of all processes for a step of four tensors of (64, 128) for each."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, IterableDataset

    if library is None:
        return None
    batch = {str(index): torch.rand(64, 128) for index in range(4)}

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield batch

    plain = DataLoader(Stream(), batch_size=None)
    loader = library.prepare_data_loader(plain, put_on_device=True, dispatch_batches=True)
    batches = islice(loader, 2 * STEPS + 20)
    drain(islice(batches, 20))
    seen = []
    for _ in range(2):
        start = time.process_time()
        drain(islice(batches, STEPS))
        seen.append(time.process_time() - start)
    total = torch.tensor(min(seen))
    dist.all_reduce(total)
    return float(total) / STEPS * 1e3


def cases() -> list[Case]:
    """All lines of the table."""
    limits = {"sequential": (0.2, 0.02, 0.005), "split": (0.4, 0.03, 0.01), "shuffled": (0.2, 0.08, 0.07)}
    enumerated = [
        Case(f"one epoch, {kind}, {processes} processes", "CPU ms", "ours/peer", limit, epoch(kind, processes))
        for kind, allowed in limits.items()
        for processes, limit in zip((8, 256, 4096), allowed, strict=True)
    ]
    skips = {"map": 0.1, "shuffled": 0.25, "stream": 0.4}
    return [
        *enumerated,
        Case("first batch, 4096 processes", "CPU us", "ours/peer", 0.005, first_batch),
        *(Case(f"skip 180,000, {kind}", "CPU ms", "ours/peer", limit, skip(kind)) for kind, limit in skips.items()),
        Case("one batch, a tensor", "CPU us", "ours - raw", 2.0, per_batch(1)),
        Case("one batch, a dict of 8", "CPU us", "ours - raw", 4.0, per_batch(8)),
        Case("dispatched step, 2 processes", "CPU ms", "ours/peer", 0.35, dispatch, 2),
        Case("dispatched step, 4 processes", "CPU ms", "ours/peer", 0.2, dispatch, 4),
    ]


def library_of(kind: str) -> Library:
    """The module with the loaders; a run is begun, since the original cannot do without."""
    if kind == "raw":
        return None
    if kind == "peer":
        import accelerate
        from accelerate import data_loader

        accelerate.Accelerator(cpu=True)
        return data_loader
    import accel_data
    from accel_state import PartialState

    PartialState(cpu=True)
    return accel_data


def child(kind: str, processes: int) -> None:
    """Measure the cases for this number of processes with one library, and print them from the first process."""
    library = library_of(kind)
    found = {case.name: case.measure(library) for case in cases() if case.processes == processes}
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found), flush=True)
    if processes > 1 and library is not None:
        import torch.distributed as dist

        dist.destroy_process_group()


def group(python: str, kind: str, processes: int) -> dict[str, Any]:
    """What a group of processes measured."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d"]
    launch = [*launch, "--rdzv-endpoint=localhost:0"] if processes > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    command = [python, *launch, __file__, "--child", kind, "--processes", str(processes)]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, timeout=600)
    found: dict[str, Any] = json.loads(next(line for line in shown.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--child", choices=("ours", "peer", "raw"))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.processes)
        return
    pythons = {"ours": sys.executable, "peer": options.peer, "raw": sys.executable}
    for processes in (1, 2, 4):
        kinds = ("ours", "peer", "raw") if processes == 1 else ("ours", "peer")
        turns = [{kind: group(pythons[kind], kind, processes) for kind in kinds} for _ in range(TURNS)]
        for case in cases():
            if case.processes != processes:
                continue
            seen = {kind: [turn[kind][case.name] for turn in turns] for kind in kinds}
            line = {kind: None if None in times else statistics.median(times) for kind, times in seen.items()}
            words = {"case": case.name, "unit": case.unit, "raw": None, **line, "figure": case.figure}
            print(json.dumps({**words, "limit": case.limit}), flush=True)


if __name__ == "__main__":
    main()
