"""The contents of one checkpoint folder: what is written into it, by whom, and how it is read back.

This module knows nothing of commits: it fills a folder that exists and reads one that is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.nn import Module

from accel_ops import rng
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import SCALER_NAME, custom_name, loader_name, random_states_name
from accel_plugins.manifest import Part
from accel_state.current import Process
from accel_state.errors import CheckpointError

__all__ = ("Contents", "LoadHook", "SaveHook", "Saver", "Stateful", "load_folder", "save_folder")

SaveHook = Callable[[list[Module], list[Any], str], None]
LoadHook = Callable[[list[Module], str], None]


class Stateful(Protocol):
    """An object whose state can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what `state_dict` returned."""


class Saver(Protocol):
    """What saving and loading ask of a strategy; see `accel_plugins.strategy.Strategy`."""

    @property
    def save_order(self) -> Sequence[Part]:
        """Parts to save, in order."""

    @property
    def load_order(self) -> Sequence[Part]:
        """Parts to load, in order."""

    @property
    def saves_together(self) -> bool:
        """Whether every process must call `save`."""

    def collect(self, part: Part, item: Any) -> Any:
        """State of one object."""

    def save(self, part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        """Write a state."""

    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        """Read a state."""


@dataclass
class Contents:
    """Everything a checkpoint holds.

    Args:
        models, optimizers, schedulers: as `prepare` returned them, in order.
        loaders: loaders whose position is saved, and restored by a load.
        scaler: whatever keeps the scale of the loss, the precision for example; left out when its state is empty.
        custom: objects registered for checkpointing.
    """

    models: list[Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    scaler: Stateful | None = None
    custom: list[Any] = field(default_factory=list)

    def of_kind(self, part: Part) -> list[Any]:
        """The objects of one kind."""
        kinds: dict[Part, list[Any]] = {
            Part.MODEL: self.models,
            Part.OPTIMIZER: self.optimizers,
            Part.SCHEDULER: self.schedulers,
            Part.LOADER: self.loaders,
        }
        return kinds[part]


def save_folder(
    folder: str | os.PathLike[str],
    contents: Contents,
    strategy: Saver,
    process: Process,
    *,
    step: int = 0,
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
    hooks: Sequence[SaveHook] = (),
) -> None:
    """Write everything into a folder that exists; called on every process.

    Args:
        folder: where to write.
        contents: what to write.
        strategy: knows how models, optimizers and schedulers are written.
        process: who this process is; the first of all writes what is equal on all.
        step: count of steps that is handed back by `load_folder`.
        safe_serialization: safetensors for weights; False writes with `torch.save`.
        save_on_each_node: let the first process of each node write what the first of all writes.
        hooks: called with (models, collected weights, folder) before writing; weights they take away are not written.

    Raises:
        CheckpointError: something cannot be written.
    """
    target = Path(folder)
    writes = process.topology.is_local_main if save_on_each_node else process.rank == 0
    collected = {
        part: [strategy.collect(part, item) for item in contents.of_kind(part)] for part in strategy.save_order
    }
    shown: list[Any] = [] if strategy.saves_together else collected.get(Part.MODEL, [])
    for hook in hooks:
        hook(contents.models, shown, str(target))
    if writes or strategy.saves_together:
        for part, states in collected.items():
            for index, state in enumerate(states):
                strategy.save(part, state, target, index, safe_serialization=safe_serialization)
    if writes:
        _save_equal(target, contents)
    _save_own(target, contents, process.rank, step)


def _save_equal(folder: Path, contents: Contents) -> None:
    """What is the same on all processes."""
    scale = contents.scaler.state_dict() if contents.scaler is not None else {}
    if scale:
        pickled.write(scale, folder / SCALER_NAME)
    for index, item in enumerate(contents.custom):
        pickled.write(item.state_dict(), folder / custom_name(index))


def _save_own(folder: Path, contents: Contents, rank: int, step: int) -> None:
    """What each process has for itself."""
    for index, loader in enumerate(contents.loaders):
        pickled.write(loader.state_dict(), folder / loader_name(index, rank))
    pickled.write({"step": step, **rng.snapshot()}, folder / random_states_name(rank))


def load_folder(
    folder: str | os.PathLike[str],
    contents: Contents,
    strategy: Saver,
    process: Process,
    *,
    map_location: Any = "cpu",
    model_options: dict[str, Any] | None = None,
    trusted: bool = False,
    waive: Collection[str] = (),
    hooks: Sequence[LoadHook] = (),
) -> int:
    """Read everything back; called on every process. Random generators come last, so loading does not move them.

    Args:
        folder: a checkpoint.
        contents: the objects to load into, in the order they were saved in.
        strategy: knows how models, optimizers and schedulers are read.
        process: who this process is.
        map_location: where tensors are read to before they go to where the objects have theirs.
        model_options: for `Module.load_state_dict`.
        trusted: let registered objects be read from any pickle, which may run code that the file brings.
        waive: what may be missing: "random_states", "scaler", "loaders", "custom".
        hooks: called with (models, folder) before anything is read; models they take away are not read.

    Returns:
        The step given to `save_folder`.

    Raises:
        CheckpointError: something is missing, damaged, or belongs to other objects.
    """
    source = Path(folder)
    models = list(contents.models)
    for hook in hooks:
        hook(models, str(source))
    for part in strategy.load_order:
        options = dict(model_options or {}) if part is Part.MODEL else {}
        for index, item in enumerate(models if part is Part.MODEL else contents.of_kind(part)):
            strategy.load(part, item, source, index, map_location=map_location, **options)
    _load_loaders(source, contents.loaders, process, "loaders" in waive)
    _load_scaler(source, contents.scaler, "scaler" in waive)
    _load_custom(source, contents.custom, trusted, "custom" in waive)
    return _load_random_states(source, process, "random_states" in waive)


def _load_loaders(folder: Path, loaders: Sequence[Any], process: Process, waived: bool) -> None:
    for index, loader in enumerate(loaders):
        path = folder / loader_name(index)
        if waived and not path.is_file():
            continue
        ranks_saved = 1 + len(list(folder.glob(loader_name(index, 1).replace("_rank1", "_rank*"))))
        same_world = ranks_saved == process.world_size
        own = folder / loader_name(index, process.rank if same_world else 0)
        loader.load_state_dict(pickled.read(own))


def _load_scaler(folder: Path, scaler: Stateful | None, waived: bool) -> None:
    if scaler is None or not scaler.state_dict():
        return
    path = folder / SCALER_NAME
    if not (waived and not path.is_file()):
        scaler.load_state_dict(pickled.read(path))


def _load_custom(folder: Path, custom: Sequence[Any], trusted: bool, waived: bool) -> None:
    saved = len(list(folder.glob(custom_name(0).replace("_0", "_[0-9]*"))))
    if saved != len(custom) and not waived:
        raise CheckpointError(
            f"{len(custom)} registered objects were to be loaded from {folder}.",
            f"It holds {saved}.",
            "Register the same objects in the same order as when it was saved, or waive 'custom'.",
        )
    for index, item in enumerate(custom[:saved]):
        item.load_state_dict(pickled.read(folder / custom_name(index), trusted=trusted))


def _load_random_states(folder: Path, process: Process, waived: bool) -> int:
    path = folder / random_states_name(process.rank)
    if not path.is_file():
        others = sorted(file.name for file in folder.glob(random_states_name(0).replace("_0", "_*")))
        if waived:
            return int(pickled.read(folder / others[0])["step"]) if others else 0
        raise CheckpointError(
            f"The random generators of process {process.rank} were to be restored from {folder}.",
            f"{path.name} is not there; it holds {', '.join(others) or 'none'}.",
            "Resume with as many processes as saved it, or waive 'random_states' to go on with other random numbers.",
        )
    states = dict(pickled.read(path))
    step = int(states.pop("step", 0))
    rng.restore(states)
    return step
