"""What a checkpoint holds: the states that one process takes at one moment, written to a folder and read back.

Taking and writing are apart so that training can go on in between, once the tensors are copied
(`checkpoint.background`). This module knows nothing of commits: it fills a folder that exists and reads one that is
there. Gradients of an unfinished accumulation window differ on each process, so each writes a file of its own;
checkpoints made between two windows have none of these files.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from accel_bigmodel.weight_files import load_weights_file, save_weights_file
from accel_ops import rng
from accel_ops.agreement import all_agree
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import (
    MANIFEST_NAME,
    RNG_STATE_NAME,
    SCALER_NAME,
    custom_name,
    extra_state_name,
    gradients_name,
    loader_name,
    optimizer_name,
    random_states_name,
    scheduler_name,
    shards_of,
    weights_name,
)
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import Part, Traits
from accel_plugins.prepared import PreparedObjects, Stateful
from accel_state.current import Process
from accel_state.errors import AccelError, CheckpointError

__all__ = (
    "CheckpointState",
    "LoadHook",
    "SaveHook",
    "Saver",
    "capture",
    "held_gradients",
    "load_folder",
    "load_gradients",
    "save_folder",
)

logger = logging.getLogger(__name__)

SaveHook = Callable[[list[Module], list[Any], str], None]
LoadHook = Callable[[list[Module], str], None]

Written = Callable[[Path], None]
_RANDOM_STATES: Final = re.compile(rf"{RNG_STATE_NAME}_(\d+)\.pkl")


class Saver(Protocol):
    """What saving and loading ask of a strategy; see `accel_plugins.strategy.Strategy`."""

    @property
    def traits(self) -> Traits:
        """How it saves."""

    def collect(self, part: Part, item: Any) -> Any:
        """State of one object."""

    def save(self, part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        """Write a state."""

    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        """Read a state."""

    def unwrap(self, model: Module) -> Module:
        """The user's model."""

    @property
    def keeps_extra_state(self) -> bool:
        """Whether it has a state of its own; others need no agreement between the processes."""

    def extra_state(self) -> Mapping[str, Any]:
        """What it keeps for itself on this process."""

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `extra_state` gave."""


def held_gradients(models: Sequence[Module]) -> dict[str, torch.Tensor]:
    """The gradients that the parameters of some models hold, by index of the model and name."""
    return {
        name: parameter.grad.detach() for name, parameter in _parameters(models).items() if parameter.grad is not None
    }


def load_gradients(models: Sequence[Module], folder: Path, rank: int) -> None:
    """Give parameters the gradients they had; where none were saved, they have none afterwards.

    Raises:
        CheckpointError: other processes have partial gradients and this one has not, or they are those of other models.
    """
    path = folder / gradients_name(rank)
    parameters = _parameters(models)
    held: dict[str, torch.Tensor] = {}
    if path.is_file():
        held = load_weights_file(path)
    elif any(folder.glob(gradients_name(0).replace("_0", "_*"))):
        raise CheckpointError(
            f"Cannot restore the gradients of process {rank} in an unfinished accumulation window from {folder}.",
            f"{path.name} is not there, while other processes have such a file.",
            "Resume with as many processes as saved it, or from a checkpoint made at the end of a window.",
        )
    _check(path, held, parameters)
    for name, parameter in parameters.items():
        parameter.grad = held[name].to(parameter.device) if name in held else None


def _parameters(models: Sequence[Module]) -> dict[str, torch.nn.Parameter]:
    return {f"{index}.{name}": value for index, model in enumerate(models) for name, value in model.named_parameters()}


def _check(path: Path, held: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter]) -> None:
    wrong = [name for name, value in held.items() if name not in parameters or parameters[name].shape != value.shape]
    if wrong:
        raise CheckpointError(
            f"Cannot restore partial gradients from {path}.",
            f"The prepared models have no parameter of that name and shape: {', '.join(wrong[:3])}.",
            "Prepare the models that were saved, in the same order.",
        )


@dataclass
class CheckpointState:
    """The states of one process; tensors may be the living ones.

    Attributes:
        objects: by kind, of models, optimizers and schedulers, in order; empty where another process writes them.
        files: whatever else is written, by file name.
        gradients: of an unfinished accumulation window, by file name.
        rank: rank of the process.
    """

    objects: dict[Part, list[Any]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    rank: int = 0

    def write(
        self,
        folder: Path,
        strategy: Saver,
        *,
        safe_serialization: bool = True,
        written: Written | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write everything into a folder that exists; on every process.

        Args:
            folder: where to write.
            strategy: knows how models, optimizers and schedulers are written.
            safe_serialization: safetensors for weights; False writes with `torch.save`.
            written: called with each file of this process that is complete, so that it can be flushed while the next
                is written.
            model_options: further ones of the strategy for models, of its `save_options`.

        Raises:
            CheckpointError: something cannot be written.
        """
        written = written or (lambda path: None)
        before = set(folder.iterdir())
        collective = strategy.traits.collective_save
        # The states of optimizers are the largest: they are hashed and flushed while weights are written.
        first = None if collective else Part.OPTIMIZER
        for part, states in sorted(self.objects.items(), key=lambda item: item[0] is not first):
            options = dict(model_options or {}) if part is Part.MODEL else {}
            for index, state in enumerate(states):
                strategy.save(part, state, folder, index, safe_serialization=safe_serialization, **options)
                if not collective:
                    before = _tell_new(folder, before, written)
                # Other files there may be incomplete: those of other processes.
                for shard in shards_of(folder, self.rank) if collective else ():
                    written(shard)
        for name, tensors in self.gradients.items():
            save_weights_file(tensors, folder / name)
            written(folder / name)
        for name, state in self.files.items():
            pickled.write(state, folder / name)
            written(folder / name)


def _tell_new(folder: Path, before: set[Path], written: Written) -> set[Path]:
    now = {path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}
    for path in sorted(now - before):
        written(path)
    return now | before


def capture(
    contents: PreparedObjects,
    strategy: Saver,
    process: Process,
    *,
    folder: Path,
    step: int = 0,
    save_on_each_node: bool = False,
    hooks: Sequence[SaveHook] = (),
    in_window: bool = False,
) -> CheckpointState:
    """Take the states of everything that this process writes; called on every process.

    Args:
        contents: what a checkpoint holds.
        strategy: knows the states of models, optimizers and schedulers.
        process: who this process is; the first of all writes what is equal on all.
        folder: path that hooks receive; files that they write there become part of the checkpoint.
        step: count of steps that is handed back when it is loaded.
        save_on_each_node: let the first process of each node write what the first of all writes.
        hooks: called with (models, collected weights, folder); weights they take away are not written.
        in_window: inside an accumulation window, whose gradients belong to the checkpoint.
    """
    writes = process.topology.is_local_main if save_on_each_node else process.rank == 0
    collected = {
        part: [strategy.collect(part, item) for item in contents.for_strategy(part)]
        for part in strategy.traits.save_order
    }
    shown: list[Any] = [] if strategy.traits.collective_save else collected.get(Part.MODEL, [])
    for hook in hooks:
        hook(contents.models, shown, str(folder))
    taken = CheckpointState(collected if writes or strategy.traits.collective_save else {}, rank=process.rank)
    if in_window:
        models = [strategy.unwrap(model) for model in contents.for_strategy(Part.MODEL)]
        taken.gradients[gradients_name(process.rank)] = held_gradients(models)
    taken.files.update(_equal(contents) if writes else {})
    taken.files.update(_extra(strategy, process))
    taken.files.update(_own(contents, process.rank, step))
    return taken


def _equal(contents: PreparedObjects) -> dict[str, Any]:
    """What is the same on all processes."""
    scale = contents.scaler.state_dict() if contents.scaler is not None else {}
    custom = {custom_name(index): item.state_dict() for index, item in enumerate(contents.custom)}
    return {**({SCALER_NAME: scale} if scale else {}), **custom}


def _extra(strategy: Saver, process: Process) -> dict[str, Any]:
    """What the strategy of this process keeps for itself.

    Raises:
        CheckpointError: the processes give different names.
    """
    if not strategy.keeps_extra_state:
        return {}
    state = dict(strategy.extra_state())
    asked = f"Cannot save the extra state of {type(strategy).__name__}."
    all_agree(process, "extra-state", ", ".join(sorted(state)), asked, error=CheckpointError)
    return {extra_state_name(process.rank): state} if state else {}


def _own(contents: PreparedObjects, rank: int, step: int) -> dict[str, Any]:
    """What each process has for itself; generators last, so that nothing before moves them."""
    loaders = {loader_name(index, rank): loader.state_dict() for index, loader in enumerate(contents.loaders)}
    return {**loaders, random_states_name(rank): {"step": step, **rng.snapshot()}}


def save_folder(
    folder: str | os.PathLike[str],
    contents: PreparedObjects,
    strategy: Saver,
    process: Process,
    *,
    safe_serialization: bool = True,
    **options: Any,
) -> None:
    """Write everything into a folder that exists; called on every process.

    Args:
        folder: where to write.
        contents: what to write.
        strategy: knows how models, optimizers and schedulers are written.
        process: who this process is.
        safe_serialization: safetensors for weights; False writes with `torch.save`.
        options: further ones of `capture`.

    Raises:
        CheckpointError: something cannot be written.
    """
    taken = capture(contents, strategy, process, folder=Path(folder), **options)
    taken.write(Path(folder), strategy, safe_serialization=safe_serialization)


def load_folder(
    folder: str | os.PathLike[str],
    contents: PreparedObjects,
    strategy: Saver,
    process: Process,
    *,
    map_location: Any = "cpu",
    model_options: dict[str, Any] | None = None,
    trusted: bool = False,
    allow_missing: Collection[str] = (),
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
        allow_missing: what may be missing: "random_states", "scaler", "loaders", "custom", "extra_state".
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
    for part in strategy.traits.load_order:
        options = dict(model_options or {}) if part is Part.MODEL else {}
        if part is Part.OPTIMIZER:
            options["models"] = [strategy.unwrap(model) for model in contents.for_strategy(Part.MODEL)]
        items = [strategy_model(model) for model in models] if part is Part.MODEL else contents.of_kind(part)
        for index, item in enumerate(items):
            with _fitting(source, item):
                strategy.load(part, item, source, index, map_location=map_location, **options)
    _load_loaders(source, contents.loaders, process, "loaders" in allow_missing)
    _load_scaler(source, contents.scaler, "scaler" in allow_missing)
    _load_custom(source, contents.custom, trusted, "custom" in allow_missing)
    _load_extra_state(source, strategy, process, "extra_state" in allow_missing)
    if process.rank == 0:
        _warn_of_unread(source, contents)
    with _fitting(source, "the random generators"):
        return _load_random_states(source, process, "random_states" in allow_missing)


def _warn_of_unread(folder: Path, contents: PreparedObjects) -> None:
    """Warn of states whose objects are not prepared: a script may have forgotten its scheduler."""
    following = (
        *(weights_name(safe, len(contents.models)) for safe in (True, False)),
        optimizer_name(len(contents.optimizers)),
        scheduler_name(len(contents.schedulers)),
        loader_name(len(contents.loaders)),
    )
    if unread := [name for name in following if (folder / name).is_file()]:
        logger.warning("%s of %s: not loaded, because fewer objects are prepared.", ", ".join(unread), folder)


@contextmanager
def _fitting(folder: Path, item: object) -> Iterator[None]:
    """Say of what an object could not be restored, where its state was read and is not one of such an object."""
    try:
        yield
    except (AccelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = item if isinstance(item, str) else f"the state of {type(item).__name__}"
        raise CheckpointError(
            f"Cannot restore {what} from {folder}.",
            f"What was saved does not fit: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Load an older checkpoint, or build the objects as they were when it was saved.",
        ) from error


def _load_loaders(folder: Path, loaders: Sequence[Any], process: Process, allow_missing: bool) -> None:
    for index, loader in enumerate(loaders):
        path = folder / loader_name(index)
        if not path.is_file() and (allow_missing or _never_saved(folder, loader)):
            continue
        ranks_saved = 1 + len(list(folder.glob(loader_name(index, 1).replace("_rank1", "_rank*"))))
        same_world = ranks_saved == process.world_size
        own = folder / loader_name(index, process.rank if same_world else 0)
        with _fitting(folder, loader):
            loader.load_state_dict(pickled.read(own))


def _never_saved(folder: Path, loader: Any) -> bool:
    """Whether a missing position is harmless: the original library saves one only for a loader that restores it."""
    foreign = not (folder / MANIFEST_NAME).is_file()
    if not foreign or getattr(loader, "restores", True):
        return False
    logger.warning("%s holds no position of a loader; an epoch of random order begins with a new one.", folder)
    return True


def _load_scaler(folder: Path, scaler: Stateful | None, allow_missing: bool) -> None:
    if scaler is None or not scaler.state_dict():
        return
    path = folder / SCALER_NAME
    if not (allow_missing and not path.is_file()):
        with _fitting(folder, scaler):
            scaler.load_state_dict(pickled.read(path))


def _load_custom(folder: Path, custom: Sequence[Any], trusted: bool, allow_missing: bool) -> None:
    saved = len(list(folder.glob(custom_name(0).replace("_0", "_[0-9]*"))))
    if saved != len(custom) and not allow_missing:
        raise CheckpointError(
            f"Cannot load {len(custom)} registered objects from {folder}.",
            f"It holds {saved}.",
            "Register the same objects in the same order as when it was saved, or pass allow_missing=('custom',).",
        )
    for index, item in enumerate(custom[:saved]):
        with _fitting(folder, item):
            item.load_state_dict(pickled.read(folder / custom_name(index), trusted=trusted))


def _load_extra_state(folder: Path, strategy: Saver, process: Process, allow_missing: bool) -> None:
    if not strategy.keeps_extra_state:
        return
    path = folder / extra_state_name(process.rank)
    if path.is_file():
        with _fitting(folder, strategy):
            strategy.load_extra_state(pickled.read(path))
    elif strategy.extra_state() and not allow_missing:
        raise CheckpointError(
            f"Cannot restore the extra state of {type(strategy).__name__} on process {process.rank} from {folder}.",
            f"There is no {path.name}: fewer processes saved it, or another backend.",
            "Resume with the backend and the processes that saved it, or pass allow_missing=('extra_state',).",
        )


def _load_random_states(folder: Path, process: Process, allow_missing: bool) -> int:
    path = folder / random_states_name(process.rank)
    ranks = sorted(int(found[1]) for file in folder.iterdir() if (found := _RANDOM_STATES.fullmatch(file.name)))
    if not allow_missing and (process.rank not in ranks or ranks[-1] >= process.world_size):
        raise CheckpointError(
            f"Cannot restore the generators of process {process.rank} of {process.world_size} from {folder}.",
            f"It holds {', '.join(map(random_states_name, ranks)) or 'none'}, so other processes saved it.",
            "Resume with as many processes as saved it, or pass allow_missing=('random_states',) to go on with others.",
        )
    if process.rank not in ranks:
        return int(pickled.read(folder / random_states_name(ranks[0]))["step"]) if ranks else 0
    states = dict(pickled.read(path))
    step = int(states.pop("step", 0))
    missing = rng.restore(states)
    if missing and not allow_missing:
        raise CheckpointError(
            f"Cannot restore the random generators of process {process.rank} from {path}.",
            f"It has no state of {', '.join(missing)}.",
            "Resume on the kind of device that saved it, or pass allow_missing=('random_states',).",
        )
    return step
