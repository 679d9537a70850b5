"""Saving and loading the state of a training: a model of 300 MB with Adam, on a disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from bench.case import Call, Case, Scope, Work
from bench.metering import paused

GROUP: Final = "checkpoints"
SAVING: Final = (
    "Saves: wall time on an idle disk, with a model of 302 MB and twice that for Adam; "
    '"raw" writes the same tensors with safetensors and torch and flushes both files. Each interpreter alternates at '
    "least five rounds of each."
)
BEHIND: Final = (
    "Asynchronous saves: the time for which training waits, until `save_state` returns with a copy of the state; "
    '"raw" copies the same tensors, the first time into new memory and later into that of the last copy.'
)
SHARDED: Final = (
    "Saves with shards: wall time until all of 4 processes have saved the model above, sharded by FSDP 2, on an idle "
    'disk; "raw" writes the same bytes with torch.save into as many files, each process its shards at the same time, '
    "and flushes them. Each group of processes alternates at least five rounds of each."
)
FIRST: Final = (
    "Loads: the first load of a process, as in a resumed run. Later loads of the original take a quarter of the time, "
    "because they reuse memory."
)
PEAK: Final = "Peak memory of a load: the increase over the memory before."

WIDTH, LAYERS = 2048, 18
ROUNDS: Final = 5
"""Of each side in an interpreter: the time of a write varies more than that of anything else here."""


def parts() -> tuple[Any, Any]:
    """A model and an optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return model, torch.optim.Adam(model.parameters(), foreach=True)


def stepped(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Both as between two steps of a loop, and at the start of one that resumes."""
    import torch

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@cache
def training(flushed: bool = True) -> tuple[Any, Any, Any]:
    """An Accelerator of either library with a prepared model and optimizer, shared by all works of an interpreter."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    settings: dict[str, Any] = {} if flushed else {"project_config": ProjectConfiguration(fsync=False)}
    accelerator = Accelerator(cpu=True, **settings)
    return accelerator, *accelerator.prepare(*stepped(*parts()))


def rested(call: Callable[[Path], object], folder: Path) -> Call:
    """Writes into a folder that is not there yet, once the disk has come to rest."""

    def run() -> None:
        with paused():
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        call(folder)

    return run


def flush(paths: Iterable[Path]) -> None:
    """Has the disk write files."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def save(flushed: bool, scope: Scope) -> Call:
    """A synchronous save; the original flushes nothing."""
    accelerator, _, _ = training(flushed or scope.kind == "peer")
    return rested(lambda folder: accelerator.save_state(str(folder)), scope.folder / scope.kind)


def write(scope: Scope) -> Call:
    """The same tensors written and flushed by hand."""
    import torch
    from safetensors.torch import save_file

    _, model, optimizer = training()

    def write(folder: Path) -> None:
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors")
        torch.save(optimizer.optimizer.state_dict(), folder / "optimizer.bin")
        flush(folder.iterdir())

    return rested(write, scope.folder / "raw")


def save_behind(scope: Scope) -> Call:
    """What an asynchronous save takes from training."""
    accelerator, _, _ = training()

    def blocked(folder: Path) -> None:
        accelerator.save_state(str(folder), async_save=True)
        with paused():
            accelerator.wait_for_checkpoint()

    return rested(blocked, scope.folder / "behind")


def copy_by_hand(scope: Scope) -> Call:
    """A copy of the tensors of the state into memory that the next copy uses again."""
    import torch

    _, model, optimizer = training()
    states = optimizer.optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(value for state in states for value in state.values())]
    kept: list[Any] = []

    def copy() -> None:
        kept.extend(torch.empty_like(tensor) for tensor in tensors[len(kept) :])
        for target, tensor in zip(kept, tensors, strict=True):
            target.copy_(tensor)

    return copy


@cache
def sharded_training() -> tuple[Any, Any, Any]:
    """An Accelerator with a model and an optimizer that has stepped, sharded over the processes."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator, *stepped(*accelerator.prepare(*parts()))


def together(call: Callable[[Path], object], folder: Path) -> Call:
    """Writes into a folder that is not there yet, with all processes, once the disk has come to rest."""
    accelerator, _, _ = sharded_training()

    def run() -> None:
        with paused():
            if accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
                os.sync()
            accelerator.wait_for_everyone()
        call(folder)
        accelerator.wait_for_everyone()

    return run


def save_sharded(scope: Scope) -> Call:
    """A synchronous save of all processes."""
    accelerator, _, _ = sharded_training()
    return together(lambda folder: accelerator.save_state(str(folder)), scope.folder / "sharded")


def write_sharded(scope: Scope) -> Call:
    """The shards of each process written and flushed by hand."""
    import torch

    accelerator, model, optimizer = sharded_training()
    shards = {"model": [parameter.to_local() for parameter in model.parameters()]}
    states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    shards["optimizer"] = [value.to_local() if hasattr(value, "to_local") else value for value in states]

    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        paths = {name: folder / f"{name}_{accelerator.process_index}.bin" for name in shards}
        for name, path in paths.items():
            torch.save(shards[name], path)
        flush(paths.values())

    return together(write, scope.folder / "raw_sharded")


def load(scope: Scope) -> Call:
    """A load of what was saved."""
    accelerator, _, _ = training()
    folder = str(scope.folder / "saved")
    accelerator.save_state(folder)
    os.sync()
    return lambda: accelerator.load_state(folder)


DURABLE: Final = Work(partial(save, True), raw=write, rounds=ROUNDS)
UNFLUSHED: Final = Work(partial(save, False), partial(save, False), rounds=ROUNDS)
OF_FOUR: Final = Work(save_sharded, raw=write_sharded, processes=4, rounds=ROUNDS)
FIRST_BEHIND: Final = Work(save_behind, raw=copy_by_hand, once=True, rounds=ROUNDS)
LATER_BEHIND: Final = Work(save_behind, raw=copy_by_hand, rounds=ROUNDS)
LOADED: Final = Work(load, load, once=True)

CASES: Final = (
    Case(GROUP, "save_state, flushed and hashed", "wall s", "ours/raw", 1.0, DURABLE, SAVING),
    Case(GROUP, "save_state, fsync=False", "wall s", "ours/peer", 1.15, UNFLUSHED, SAVING),
    Case(GROUP, "save_state, 4 processes with shards", "wall s", "ours/raw", 1.15, OF_FOUR, SHARDED),
    Case(GROUP, "async_save, blocked by the first", "wall s", "ours/raw", 1.3, FIRST_BEHIND, BEHIND),
    Case(GROUP, "async_save, blocked by each later", "wall s", "ours/raw", 1.3, LATER_BEHIND, BEHIND),
    Case(GROUP, "load_state", "wall s", "ours/peer", 0.5, LOADED, FIRST),
    Case(GROUP, "load_state, peak memory", "MB", "ours", 100.0, LOADED, PEAK),
)
