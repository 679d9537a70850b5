"""Models larger than memory: offloaded forwards, loading 2 GB, device maps, empty models and offload set-up."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from bench.case import Call, Case, Scope, Side, Work
from bench.metering import paused

GROUP: Final = "big_models"
FORWARDS: Final = (
    "Forward: wall time over 16 blocks of two 2048 x 2048 layers, with the files in the page cache. The disk of 500 "
    'MB/s is simulated by a delay of each read; "raw" reads and computes at the same time, without any other work.'
)
LOADS: Final = (
    "Loads: CPU time and peak memory of one load in a fresh process that has loaded a tiny model before. Peak memory "
    "is the increase over the memory before the load."
)
COLD: Final = (
    "Loads from the disk: wall time of a load of 2 GB after posix_fadvise removed the files from the page cache."
)
MAPS: Final = "Device maps: CPU time of a call for 200 blocks of 20 modules on the meta device."
LARGE: Final = (
    "An empty decoder of 115 GB in bfloat16 is built and mapped, once in each fresh process; peak memory is the "
    "increase over the memory before."
)
EMPTY: Final = 'Empty models: "raw" is `torch.device("meta")`.'
SET_UP: Final = "Offload: CPU time until a model of 20 such blocks in memory can run with its weights offloaded."

BLOCKS, WIDTH, BATCH, LARGE_BATCH = 16, 2048, 4, 256
LAYERS, SHARD, BYTES_PER_SECOND = 30, "256MB", 500e6


def library(scope: Scope) -> Any:
    """The functions of ours or of the original."""
    return scope.library("accel_bigmodel", "accelerate", "accelerate.utils", "accelerate.hooks")


# ---------------------------------------------------------------- forwards
def blocks() -> Any:
    """The model whose forward is measured."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2 * BLOCKS)]
    pairs = [torch.nn.Sequential(*layers[number : number + 2]) for number in range(0, 2 * BLOCKS, 2)]
    return torch.nn.Sequential(*pairs).eval()


def forward(model: Any, batch: int = BATCH) -> Call:
    """A forward, after one in which the order of the weights is seen."""
    import torch

    inputs = torch.randn(batch, WIDTH)

    def run() -> None:
        with torch.no_grad():
            model(inputs)

    run()
    return run


def offloaded_forward(scope: Scope) -> Call:
    """A forward on weights that are on the disk in the dtype of the model."""
    model = blocks()
    library(scope).disk_offload(model, scope.folder, "cpu")
    return forward(model)


def converted_forward(scope: Scope) -> Call:
    """A forward on weights that are on the disk in another dtype, and so have to be read."""
    state = {name: weight.bfloat16() for name, weight in blocks().state_dict().items()}
    library(scope).offload_state_dict(scope.folder, state)
    model = blocks()
    library(scope).disk_offload(model, scope.folder, "cpu")
    return forward(model)


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


def slow_forward(scope: Scope) -> Call:
    """A forward whose weights come slowly, at a batch that makes computing about as long as reading."""
    model = blocks()
    disk = SlowDisk({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    library(scope).attach_align_device_hook(model, "cpu", offload=True, weights_map=disk)
    return forward(model, LARGE_BATCH)


def reading_beside_computing(scope: Scope) -> Call:
    """The longer of reading and computing."""
    compute = forward(blocks(), LARGE_BATCH)
    # bfloat16 takes two bytes.
    seconds = 2 * sum(weight.numel() for weight in blocks().state_dict().values()) / BYTES_PER_SECOND

    def run() -> None:
        reading = threading.Thread(target=time.sleep, args=(seconds,))
        reading.start()
        compute()
        reading.join()

    return run


# ---------------------------------------------------------------- loading
def layers() -> Any:
    """The model that is loaded: 2 GB in float32."""
    import torch

    return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(LAYERS)))


def checkpoint(scope: Scope) -> str:
    """The folder of the checkpoint that all turns load; whoever comes first, which is ours, writes it."""
    import torch

    folder = scope.kept / "checkpoint"
    if not folder.exists():
        folder.mkdir()
        with torch.device("meta"):
            shapes = layers().state_dict()
        weights = {name: torch.rand(weight.shape) for name, weight in shapes.items()}
        library(scope).save_weights(weights, folder, SHARD)
    return str(folder)


def load_small(functions: Any, folder: Path) -> None:
    """Load a tiny model, so that what a library imports at its first load is not counted."""
    import torch
    from safetensors.torch import save_file

    file = folder / "small.safetensors"
    save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, file)
    with functions.init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    functions.load_checkpoint_and_dispatch(model, str(file), device_map={"": "cpu"})


def load(how: str, scope: Scope) -> Call:
    """One load in one of four ways; "copied" copies each weight, since a mapped file takes no memory."""
    import torch

    functions, folder = library(scope), checkpoint(scope)
    with functions.init_empty_weights():
        model = layers()
    options: dict[str, Any] = {"device_map": {"": "cpu"}}
    if how == "half to the disk":
        options = {"device_map": {str(number): "disk" if number % 2 else "cpu" for number in range(LAYERS)}}
        options["offload_folder"] = scope.folder / "away"
    if how == "as bf16":
        options["dtype"] = torch.bfloat16

    def run() -> None:
        loaded = functions.load_checkpoint_and_dispatch(model, folder, **options)
        if how == "copied":
            for parameter in loaded.parameters():
                parameter.data = parameter.data.clone()

    load_small(functions, scope.folder)
    return run


def take_out_of_cache(folder: str) -> None:
    """Leave the files of a checkpoint on the disk alone."""
    for file in Path(folder).glob("*.safetensors"):
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_load(scope: Scope) -> Call:
    """A load from the disk as bfloat16, into new memory."""
    import torch

    functions, folder = library(scope), checkpoint(scope)
    models: list[Any] = []

    def run() -> None:
        with paused():
            # The model of the round before is deleted while nothing is measured.
            models.clear()
            with functions.init_empty_weights():
                models.append(layers())
            take_out_of_cache(folder)
        functions.load_checkpoint_in_model(models[0], folder, {"": "cpu"}, dtype=torch.bfloat16)

    return run


def loads(name: str, how: str, seconds: float, memory: float | None) -> tuple[Case, Case]:
    """What one way to load takes, and what it holds."""
    side = partial(load, how)
    case = partial(Case, GROUP, figure="ours/peer", work=Work(side, side, once=True), method=LOADS)
    return (
        case(name=name, unit="CPU s", limit=seconds),
        case(name=f"{name}: peak memory", unit="MB", limit=memory),
    )


# ---------------------------------------------------------------- maps, empty models and set-up
def many_modules(number: int = 200) -> Any:
    """Blocks of 20 modules, of which 14 have weights."""
    from torch import nn

    class Block(nn.ModuleDict):
        pass

    def block() -> Any:
        attention = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkvo"})
        inner = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for name in "ab"})
        norms = nn.ModuleDict({str(number): nn.LayerNorm(64) for number in range(4)})
        return Block({"attention": attention, "inner": inner, "norms": norms})

    return nn.Sequential(nn.Embedding(1000, 64), *(block() for _ in range(number)), nn.Linear(64, 1000))


def mapped(function: str, kept: tuple[str, ...], scope: Scope) -> Call:
    """A device map, or balanced budgets; blocks of the classes `kept` are not split."""
    functions = library(scope)
    with functions.init_empty_weights():
        model = many_modules()
    size = functions.compute_module_sizes(model)[""]
    call = getattr(functions, function)
    # The original takes no index of an accelerator that is not there; the order in which it fills them is the same.
    budget = {"cpu": size // 3, "disk": size} if function == "infer_auto_device_map" else {0: size, 1: size}
    return lambda: call(model, dict(budget), no_split_module_classes=list(kept))


def map_of_100_gb(scope: Scope) -> Call:
    """Making an empty decoder of 100 GB in bfloat16, and a device map of it for devices of 40 GB."""
    import torch
    from torch import nn

    functions, width, inner, budget = library(scope), 8192, 28672, {"cpu": 40 * 10**9, "disk": 10**12}

    def block() -> Any:
        linears = [nn.Linear(width, width, bias=False) for _ in range(4)]
        linears += [nn.Linear(width, inner, bias=False) for _ in range(2)]
        return nn.Sequential(*linears, nn.Linear(inner, width, bias=False), nn.LayerNorm(width))

    def run() -> None:
        with functions.init_empty_weights():
            model = nn.Sequential(nn.Embedding(128256, width), *(block() for _ in range(58))).to(torch.bfloat16)
        assert functions.compute_module_sizes(model)[""] > 100 * 10**9
        functions.infer_auto_device_map(model, dict(budget), no_split_module_classes=["Sequential"])

    return run


def empty(scope: Scope) -> Call:
    """Making the model without weights."""
    import torch

    make = (lambda: torch.device("meta")) if scope.kind == "raw" else library(scope).init_empty_weights

    def run() -> None:
        with make():
            many_modules()

    return run


def set_up(function: str, scope: Scope) -> Call:
    """Offloading the weights of a fresh model."""
    functions, numbers = library(scope), count()

    def run() -> None:
        with paused():
            model, folder = many_modules(20), scope.folder / f"{scope.kind}-{next(numbers)}"
        if function == "disk_offload":
            functions.disk_offload(model, folder, "cpu")
        else:
            functions.cpu_offload(model, "cpu")
        with paused():
            shutil.rmtree(folder, ignore_errors=True)

    return run


def beside_original(name: str, unit: str, limit: float, side: Side, method: str) -> Case:
    """A case of ours beside the original."""
    return Case(GROUP, name, unit, "ours/peer", limit, Work(side, side), method)


SLOWLY: Final = Work(slow_forward, raw=reading_beside_computing)

LARGE_MAP: Final = Work(map_of_100_gb, once=True)

CASES: Final = (
    beside_original("forward from the disk, in the page cache", "wall s", 0.5, offloaded_forward, FORWARDS),
    beside_original(
        "forward from bf16 weights on the disk, through the reader thread", "wall s", 0.65, converted_forward, FORWARDS
    ),
    Case(GROUP, "forward from a disk of 500 MB/s", "wall s", "ours/raw", 1.3, SLOWLY, FORWARDS),
    *loads("load 2 GB to the CPU", "to the CPU", 0.1, None),
    *loads("load 2 GB, half to the disk", "half to the disk", 0.05, 1.0),
    *loads("load 2 GB and copy each weight", "copied", 0.7, None),
    *loads("load 2 GB as bf16", "as bf16", 0.7, 1.0),
    beside_original("load 2 GB from the disk, not in the page cache, as bf16", "wall s", 1.0, cold_load, COLD),
    *(
        beside_original(f"{name}, 200 blocks", "CPU ms", limit, partial(mapped, function, kept), MAPS)
        for name, function, kept, limit in (
            ("infer_auto_device_map", "infer_auto_device_map", ("Block",), 0.2),
            ("infer_auto_device_map that splits blocks", "infer_auto_device_map", (), 0.25),
            ("get_balanced_memory", "get_balanced_memory", ("Block",), 0.25),
        )
    ),
    Case(GROUP, "device map of a model of 100 GB", "wall s", "ours", 5.0, LARGE_MAP, LARGE),
    Case(GROUP, "peak memory: device map of a model of 100 GB", "MB", "ours", 1000.0, LARGE_MAP, LARGE),
    Case(GROUP, "init_empty_weights, 200 blocks", "CPU ms", "ours/raw", 1.2, Work(empty, empty, empty), EMPTY),
    beside_original("disk_offload, 20 blocks", "CPU ms", 0.8, partial(set_up, "disk_offload"), SET_UP),
    beside_original("cpu_offload, 20 blocks", "CPU ms", 0.8, partial(set_up, "cpu_offload"), SET_UP),
)
