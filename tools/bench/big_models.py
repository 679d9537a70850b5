"""Models larger than memory: offloaded forwards, loading 2 GB in shards, device maps and empty models.

Each library is measured in interpreters of its own, ours and the original in turn, three times each; shown is the
median of the turns. Forwards are the median of five passes over 16 blocks of two 2048 x 2048 layers, with the files in
the page cache; loads are the CPU time of one call in a fresh process that has loaded a tiny model before, peak memory
what that process held at most, less what it held before. The slow disk gives each weight after the time that 500 MB/s
need; raw is the longer of reading and computing alone. Device maps and empty models are the least of five calls for 200
blocks of 20 modules; raw is `torch.device("meta")`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TURNS, PASSES = 3, 5
BLOCKS, WIDTH, BATCH, LARGE_BATCH = 16, 2048, 4, 256
LAYERS, SHARD = 30, "256MB"
BYTES_PER_SECOND = 500e6


class Case(NamedTuple):
    """One line of the table.

    Args:
        name: what is done.
        unit: what is measured.
        figure: the expression that the limit applies to.
        limit: the most that it may be; None where both do the same.
        measure: gives the figures by "ours", "peer" and "raw", for the kind of interpreter it runs in.
    """

    name: str
    unit: str
    figure: str
    limit: float | None
    measure: Callable[[str, Path], dict[str, float]]


def library(kind: str) -> Any:
    """The functions of ours or of the original."""
    if kind == "ours":
        return importlib.import_module("accel_bigmodel")
    names: Any = argparse.Namespace()
    for module in ("accelerate", "accelerate.utils", "accelerate.hooks"):
        vars(names).update(vars(importlib.import_module(module)))
    return names


# ---------------------------------------------------------------- forwards
def blocks(dtype: Any = None) -> Any:
    """The model whose forward is measured."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2 * BLOCKS)]
    pairs = [torch.nn.Sequential(*layers[number : number + 2]) for number in range(0, 2 * BLOCKS, 2)]
    return torch.nn.Sequential(*pairs).eval()


def passes(model: Any, batch: int = BATCH) -> float:
    """Median seconds of a forward, after two that learn the order and fill the page cache."""
    import torch

    x, seconds = torch.randn(batch, WIDTH), []
    with torch.no_grad():
        for number in range(PASSES + 2):
            start = time.perf_counter()
            model(x)
            if number >= 2:
                seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def offloaded_forward(kind: str, folder: Path) -> dict[str, float]:
    """A forward on weights that lie on the disk in the dtype of the model."""
    with tempfile.TemporaryDirectory(dir=folder) as offload:
        model = blocks()
        library(kind).disk_offload(model, offload, "cpu")
        return {kind: passes(model)}


def converted_forward(kind: str, folder: Path) -> dict[str, float]:
    """A forward on weights that lie on the disk in another dtype, and so have to be brought."""
    import torch

    with tempfile.TemporaryDirectory(dir=folder) as offload:
        state = {name: weight.bfloat16() for name, weight in blocks().state_dict().items()}
        library(kind).offload_state_dict(offload, state)
        model = blocks(torch.float32)
        library(kind).disk_offload(model, offload, "cpu")
        return {kind: passes(model)}


class SlowDisk(Mapping[str, Any]):
    """Weights that come at 500 MB/s, one after the other."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Any:
        weight = self.weights[name]
        time.sleep(weight.nbytes / BYTES_PER_SECOND)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def slow_disk_forward(kind: str, folder: Path) -> dict[str, float]:
    """A forward whose weights come slowly, at a batch that makes computing about as long as reading."""
    if kind == "peer":
        return {}
    state = {name: weight.bfloat16() for name, weight in blocks().state_dict().items()}
    reading = sum(weight.nbytes for weight in state.values()) / BYTES_PER_SECOND
    model = blocks()
    computing = passes(model, LARGE_BATCH)
    library(kind).attach_align_device_hook(model, "cpu", offload=True, weights_map=SlowDisk(state))
    return {"ours": passes(model, LARGE_BATCH), "raw": max(reading, computing)}


# ---------------------------------------------------------------- loading
def layers() -> Any:
    """The model that is loaded: 2 GB in float32."""
    import torch

    return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(LAYERS)))


def checkpoint(folder: Path) -> None:
    """Write the checkpoint that both load."""
    import torch

    from accel_bigmodel import save_weights

    with torch.device("meta"):
        shapes = layers().state_dict()
    save_weights({name: torch.rand(weight.shape) for name, weight in shapes.items()}, folder, SHARD)


def load(how: str, kind: str, folder: Path) -> dict[str, float]:
    """CPU seconds and peak memory of one load, in a process of its own."""
    command = [sys.executable, __file__, "--child", kind, "--load", how, "--folder", str(folder)]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found: dict[str, float] = json.loads(shown.stdout.splitlines()[-1])
    return found


_loads: dict[tuple[str, str], dict[str, float]] = {}


def loading(how: str, figure: str) -> Callable[[str, Path], dict[str, float]]:
    """Makes the measurement of one figure of one way to load; each is done once for both figures."""

    def measure(kind: str, folder: Path) -> dict[str, float]:
        if (how, kind) not in _loads:
            _loads[how, kind] = load(how, kind, folder)
        return {kind: _loads[how, kind][figure]}

    return measure


def load_once(how: str, kind: str, folder: Path) -> None:
    """Load in one of four ways, and print what it took."""
    import torch

    functions = library(kind)
    with functions.init_empty_weights():
        model = layers()
    options: dict[str, Any] = {"device_map": {"": "cpu"}}
    away = tempfile.TemporaryDirectory(dir=folder)
    if how == "half to disk":
        options = {"device_map": {str(number): "disk" if number % 2 else "cpu" for number in range(LAYERS)}}
        options["offload_folder"] = away.name
    if how == "bf16":
        options["dtype"] = torch.bfloat16
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        import_everything(functions, folder)
        gc.collect()
        before, start = peak(reset=True), time.process_time()
        model = functions.load_checkpoint_and_dispatch(model, str(folder), **options)
        if how == "materialised":
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
    spent, held = time.process_time() - start, peak() - before
    away.cleanup()
    print(json.dumps({"seconds": spent, "memory": held}))


def import_everything(functions: Any, folder: Path) -> None:
    """Load a tiny model, so that what a library imports at its first load is not counted."""
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir=folder) as small:
        save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, f"{small}/model.safetensors")
        with functions.init_empty_weights():
            model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        functions.load_checkpoint_and_dispatch(model, f"{small}/model.safetensors", device_map={"": "cpu"})


def peak(reset: bool = False) -> float:
    """Megabytes that this process held at most, and from now on when `reset`."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


# ---------------------------------------------------------------- maps and empty models
def many_modules() -> Any:
    """200 blocks of 20 modules, of which 14 have weights."""
    from torch import nn

    def block() -> Any:
        attention = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkvo"})
        inner = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for name in "ab"})
        norms = nn.ModuleDict({str(number): nn.LayerNorm(64) for number in range(4)})
        return Block({"attention": attention, "inner": inner, "norms": norms})

    class Block(nn.ModuleDict):
        pass

    return nn.Sequential(nn.Embedding(1000, 64), *(block() for _ in range(200)), nn.Linear(64, 1000))


def least(call: Callable[[], object]) -> float:
    """Milliseconds of CPU time of the quickest of five calls."""
    times = []
    for _ in range(PASSES):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def mapped(function: str) -> Callable[[str, Path], dict[str, float]]:
    """Makes the measurement of a device map, or of balanced budgets."""

    def measure(kind: str, folder: Path) -> dict[str, float]:
        functions = library(kind)
        with functions.init_empty_weights():
            model = many_modules()
        size = functions.compute_module_sizes(model)[""]
        call = getattr(functions, function)
        # The original takes no index of an accelerator that is not there; the order in which it fills them is the same.
        budget = {"cpu": size // 3, "disk": size} if function == "infer_auto_device_map" else {0: size, 1: size}
        return {kind: least(lambda: call(model, dict(budget), no_split_module_classes=["Block"]))}

    return measure


def empty(kind: str, folder: Path) -> dict[str, float]:
    """Making the model without weights."""
    import torch

    def by_device() -> None:
        with torch.device("meta"):
            many_modules()

    def by_library() -> None:
        with init():
            many_modules()

    init = library(kind).init_empty_weights
    return {kind: least(by_library), **({"raw": least(by_device)} if kind == "ours" else {})}


CASES = (
    Case("forward from the disk, in the page cache", "s", "ours/peer", 0.5, offloaded_forward),
    Case("the same through the reader thread (bf16 on the disk)", "s", "ours/peer", 0.65, converted_forward),
    Case("the same from a disk of 500 MB/s", "s", "ours/raw", 1.3, slow_disk_forward),
    Case("load 2 GB to the CPU", "CPU s", "ours/peer", 0.1, loading("mapped", "seconds")),
    Case("load 2 GB, half to the disk", "CPU s", "ours/peer", 0.05, loading("half to disk", "seconds")),
    Case("load 2 GB and copy each weight", "CPU s", "ours/peer", 0.7, loading("materialised", "seconds")),
    Case("load 2 GB as bf16", "CPU s", "ours/peer", 0.7, loading("bf16", "seconds")),
    Case("peak memory: to the CPU", "MB", "ours/peer", None, loading("mapped", "memory")),
    Case("peak memory: half to the disk", "MB", "ours/peer", 1.0, loading("half to disk", "memory")),
    Case("peak memory: copied", "MB", "ours/peer", None, loading("materialised", "memory")),
    Case("peak memory: as bf16", "MB", "ours/peer", 1.0, loading("bf16", "memory")),
    Case("infer_auto_device_map, 200 blocks", "CPU ms", "ours/peer", 0.2, mapped("infer_auto_device_map")),
    Case("get_balanced_memory, 200 blocks", "CPU ms", "ours/peer", 0.25, mapped("get_balanced_memory")),
    Case("init_empty_weights, 200 blocks", "CPU ms", "ours/raw", 1.2, empty),
)


def child(kind: str, folder: Path, only: str) -> None:
    """Measure all cases with one library and print them."""
    print(json.dumps({case.name: case.measure(kind, folder) for case in CASES if only in case.name}), flush=True)


def turn(python: str, kind: str, folder: Path, only: str) -> dict[str, dict[str, float]]:
    """What one interpreter measured."""
    command = [python, "-W", "ignore", __file__, "--child", kind, "--folder", str(folder), "--only", only]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    found: dict[str, dict[str, float]] = json.loads(shown.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--child", choices=("ours", "peer"))
    parser.add_argument("--load", default="")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.load:
        load_once(options.load, options.child, options.folder)
        return
    if options.child:
        child(options.child, options.folder, options.only)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint(folder)
        pythons = {"ours": sys.executable, "peer": options.peer}
        turns = [turn(python, kind, folder, options.only) for _ in range(TURNS) for kind, python in pythons.items()]
    for case in CASES:
        if options.only not in case.name:
            continue
        line: dict[str, Any] = {"case": case.name, "unit": case.unit}
        for figure in ("ours", "peer", "raw"):
            seen = [found[case.name][figure] for found in turns if figure in found[case.name]]
            line[figure] = statistics.median(seen) if seen else None
        print(json.dumps({**line, "figure": case.figure, "limit": case.limit}), flush=True)


if __name__ == "__main__":
    main()
