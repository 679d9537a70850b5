"""The content of a checkpoint: the states that a process takes at one moment, written to a folder and read back.

Taking and writing are separate, so that training can continue in between, after the tensors are copied
(`checkpoint.background`). This module does not commit: it writes into and reads from an existing folder. Gradients of
an unfinished accumulation window differ between processes, so each process writes a separate file; checkpoints between
two windows have no such files.
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
from torch.distributed.tensor import DTensor
from torch.nn import Module

from accel_bigmodel.weight_files import load_weights_file, save_weights_file
from accel_ops import rng
from accel_ops.agreement import all_agree
from accel_ops.dtensors import full_tensor
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import (
    MANIFEST_NAME,
    RNG_STATE_NAME,
    SCALER_NAME,
    STEP_GUARD_NAME,
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
from accel_plugins.checkpoint.models import identity_of, matched_models, saved_models
from accel_plugins.checkpoint.parts import plain_state_dict, read_part
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import SAVED_KINDS, Capabilities, ObjectKind
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
    """The methods of a strategy that saving and loading call.

    A strategy is above this folder, because its methods call functions of it, so this is not its class.
    """

    @property
    def capabilities(self) -> Capabilities:
        """How the strategy saves."""

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        """The state of one object."""

    def save(self, kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        """Write a state."""

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        """Read a state."""

    def unwrap(self, model: Module) -> Module:
        """The user's model."""

    def overrides(self, method: str) -> bool:
        """Whether it overrides a method; without an extra state, the processes need not agree."""

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load full weights, by their names in the user's model."""

    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        """The strategy's extra state on this process."""

    def load_extra_state(self, state: Mapping[str, Any], models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        """Restore the result of `extra_state`."""


def held_gradients(models: Sequence[Module]) -> dict[str, torch.Tensor]:
    """The current gradients of models, by index of the model and parameter name."""
    return {
        name: parameter.grad.detach() for name, parameter in _parameters(models).items() if parameter.grad is not None
    }


def load_gradients(models: Sequence[Module], folder: Path, rank: int) -> None:
    """Restore the saved gradients of parameters; those without a saved gradient get None.

    Raises:
        CheckpointError: only other processes have partial gradients, or they belong to other models.
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
            "Resume with the same number of processes, or from a checkpoint at the end of a window.",
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
            "Prepare the same models in the same order as when the checkpoint was saved.",
        )


@dataclass
class CheckpointState:
    """The states of one process; tensors may share memory with the objects.

    Attributes:
        objects: by kind, the states of models, optimizers and schedulers, in order; empty if another process writes
            them.
        files: all other data, by file name.
        gradients: the gradients of an unfinished accumulation window, by file name.
        rank: rank of the process.
        evaluated: weights of models that are only evaluated, by file name, where the strategy writes the others by
            collectives; the indices of `objects` have a gap for each.
    """

    objects: dict[ObjectKind, list[Any]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    rank: int = 0
    evaluated: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def write(
        self,
        folder: Path,
        strategy: Saver,
        *,
        safe_serialization: bool = True,
        written: Written | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write everything into an existing folder; called on every process.

        Args:
            folder: the folder in which to write.
            strategy: writes models, optimizers and schedulers.
            safe_serialization: use safetensors for weights; False: `torch.save`.
            written: called with each complete file of this process, so that it can be flushed while the next one is
                written.
            model_options: further options for models, from `Strategy.save_options`.

        Raises:
            CheckpointError: a file cannot be written.
        """
        written = written or (lambda path: None)
        before = set(folder.iterdir())
        collective = strategy.capabilities.collective_save
        # Optimizer states are the largest, so they are written first: they are hashed and flushed while weights are
        # written.
        first = None if collective else ObjectKind.OPTIMIZER
        for kind, states in sorted(self.objects.items(), key=lambda item: item[0] is not first):
            options = dict(model_options or {}) if kind is ObjectKind.MODEL else {}
            for index, state in enumerate(states):
                if state is None:
                    continue
                strategy.save(kind, state, folder, index, safe_serialization=safe_serialization, **options)
                if not collective:
                    before = _tell_new(folder, before, written)
                # Other files, of other processes, may be incomplete.
                for shard in shards_of(folder, self.rank) if collective else ():
                    written(shard)
        for name, tensors in (*self.gradients.items(), *self.evaluated.items()):
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
    """Take all states that this process writes; called on every process.

    Args:
        contents: the objects of the checkpoint.
        strategy: returns the states of models, optimizers and schedulers.
        process: this process; the first one writes states that are equal on all.
        folder: the path that hooks receive; files that they write there become part of the checkpoint.
        step: a step count that loading returns.
        save_on_each_node: the first process of each node writes the same files as the first of all.
        hooks: called with (models, collected weights, folder); weights that they remove are not written.
        in_window: inside an accumulation window; its gradients are part of the checkpoint.
    """
    writes = process.topology.is_local_main if save_on_each_node else process.rank == 0
    collective = strategy.capabilities.collective_save
    collected = {kind: [strategy.collect(kind, item) for item in contents.for_strategy(kind)] for kind in SAVED_KINDS}
    evaluated = dict[str, dict[str, Tensor]]()
    for index, model in enumerate(contents.all_models):
        if contents.is_evaluated(model):
            weights = _whole_weights(strategy, model)
            collected[ObjectKind.MODEL].insert(index, None if collective else weights)
            evaluated.update({weights_name(True, index): weights} if writes and collective else {})
    shown: list[Any] = [] if collective else collected.get(ObjectKind.MODEL, [])
    for hook in hooks:
        hook(contents.all_models, shown, str(folder))
    taken = CheckpointState(collected if writes or collective else {}, rank=process.rank, evaluated=evaluated)
    if in_window:
        models = [strategy.unwrap(model) for model in contents.for_strategy(ObjectKind.MODEL)]
        taken.gradients[gradients_name(process.rank)] = held_gradients(models)
    taken.files.update(_equal(contents) if writes else {})
    taken.files.update(_extra(contents, strategy, process))
    taken.files.update(_own(contents, process.rank, step))
    return taken


def _whole_weights(strategy: Saver, model: Module) -> dict[str, Tensor]:
    """The weights of a model that is only evaluated; a collective if parts of them are on other processes."""
    weights = plain_state_dict(strategy.unwrap(strategy_model(model)))
    return {name: full_tensor(value) if isinstance(value, DTensor) else value for name, value in weights.items()}


def _equal(contents: PreparedObjects) -> dict[str, Any]:
    """Data that is equal on all processes."""
    scale = contents.scaler.state_dict() if contents.scaler is not None else {}
    custom = {custom_name(index): item.state_dict() for index, item in enumerate(contents.custom)}
    history = {} if contents.guard is None else {STEP_GUARD_NAME: contents.guard.state_dict()}
    return {**({SCALER_NAME: scale} if scale else {}), **custom, **history}


def _extra(contents: PreparedObjects, strategy: Saver, process: Process) -> dict[str, Any]:
    """The extra state of this process's strategy.

    Raises:
        CheckpointError: the processes return different names.
    """
    if not strategy.overrides("extra_state"):
        return {}
    state = dict(strategy.extra_state(*_trained(contents)))
    failure = f"Cannot save the extra state of {type(strategy).__name__}."
    all_agree(process, "extra-state", ", ".join(sorted(state)), failure, error=CheckpointError)
    return {extra_state_name(process.rank): state} if state else {}


def _trained(contents: PreparedObjects) -> tuple[list[Module], list[Any]]:
    """The models and the optimizers of a checkpoint, as the strategy set them up."""
    return contents.for_strategy(ObjectKind.MODEL), contents.for_strategy(ObjectKind.OPTIMIZER)


def _own(contents: PreparedObjects, rank: int, step: int) -> dict[str, Any]:
    """Data of each process; random-number generators last, so that nothing before advances them."""
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
        folder: the folder in which to write.
        contents: the objects to write.
        strategy: writes models, optimizers and schedulers.
        process: this process.
        safe_serialization: use safetensors for weights; False: `torch.save`.
        options: further options of `capture`.

    Raises:
        CheckpointError: a file cannot be written.
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
    allow_unread: Collection[str] = (),
    hooks: Sequence[LoadHook] = (),
    shown: Path | None = None,
    facts: Mapping[str, Any] | None = None,
    checked: Callable[[], object] = lambda: None,
) -> int:
    """Load everything; called on every process. Random-number generators are last, so that loading does not advance
    them.

    Args:
        folder: a checkpoint.
        contents: the objects to load into, in the order in which they were saved.
        strategy: reads models, optimizers and schedulers.
        process: this process.
        map_location: the device to which tensors are read before they are copied into the objects.
        model_options: options of `Module.load_state_dict`.
        trusted: read registered objects from any pickle, which may run code from the file.
        allow_missing: data that may be missing: "random_states", "scaler", "loaders", "custom", "extra_state".
        allow_unread: data that may remain unread: "models".
        hooks: called with (models, folder) before anything is read; models that they remove are not read.
        shown: the path of the folder for hooks and warnings, if `folder` is not the one that people know.
        facts: those of the manifest.
        checked: called once everything besides models, optimizers and schedulers is read, before anything is changed.

    Returns:
        The step that was passed to `save_folder`.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to other objects.
    """
    source = Path(folder)
    models = list(contents.all_models)
    for hook in hooks:
        hook(models, str(shown or source))
    # The place of a model among those that a hook leaves is up to the hook.
    places = (
        list(range(len(models))) if hooks else _places(source, facts or {}, models, strategy, "models" in allow_unread)
    )
    rest = [
        *_loader_states(source, contents.loaders, process, "loaders" in allow_missing, shown or source),
        *_scaler_state(source, contents.scaler, "scaler" in allow_missing),
        *_guard_state(source, contents.guard),
        *_custom_states(source, contents.custom, trusted, "custom" in allow_missing),
    ]
    extra = _read_extra_state(source, contents, strategy, process, "extra_state" in allow_missing)
    # A script may call `save_state` on the main process only; the original then warns about the missing states too.
    alone = bool((facts or {}).get("alone"))
    step, generators = _random_states(source, process, alone or "random_states" in allow_missing)
    checked()
    for index, model in zip(places, models, strict=True):
        with _fitting(source, model):
            inner, options = strategy_model(model), dict(model_options or {})
            if contents.is_evaluated(model):
                _load_evaluated(strategy, inner, source, index, map_location, options)
            else:
                strategy.load(ObjectKind.MODEL, inner, source, index, map_location=map_location, **options)
    _load_steppers(source, contents, strategy, map_location)
    for item, state in rest:
        with _fitting(source, item, " Models, optimizers and schedulers were restored before it."):
            item.load_state_dict(state)
    if extra is not None:
        with _fitting(source, strategy, " The objects were restored before it."):
            strategy.load_extra_state(extra, *_trained(contents))
    if process.rank == 0:
        _warn_of_unread(source, contents, shown or source)
    with _fitting(source, "the random-number generators", " Everything else was restored before them."):
        rng.restore(generators)
    return step


def _places(
    folder: Path, facts: Mapping[str, Any], models: Sequence[Module], strategy: Saver, allow_unread: bool
) -> list[int]:
    """The index of the saved model for each prepared one."""
    saved = saved_models(folder, facts)
    own = [strategy.unwrap(strategy_model(model)) for model in models]
    shapes = not strategy.capabilities.collective_save
    described = [(type(model).__name__, identity_of(model, shapes=shapes)) for model in own]
    return matched_models(folder, saved, described, allow_unread=allow_unread)


def _load_steppers(folder: Path, contents: PreparedObjects, strategy: Saver, map_location: Any) -> None:
    """Load optimizers and schedulers."""
    own = [strategy.unwrap(model) for model in contents.for_strategy(ObjectKind.MODEL)]
    for kind in SAVED_KINDS:
        options = {"models": own} if kind is ObjectKind.OPTIMIZER else {}
        for index, item in enumerate([] if kind is ObjectKind.MODEL else contents.for_strategy(kind)):
            with _fitting(folder, item):
                strategy.load(kind, item, folder, index, map_location=map_location, **options)


def _load_evaluated(
    strategy: Saver, model: Module, folder: Path, index: int, map_location: Any, options: Mapping[str, Any]
) -> None:
    """Load a model that is only evaluated, from a file with all of its weights."""
    own = strategy.unwrap(model)
    if any(isinstance(value, DTensor) for value in own.state_dict().values()):
        path = next(path for safe in (True, False) if (path := folder / weights_name(safe, index)).is_file())
        strategy.load_weights(model, load_weights_file(path), options.get("strict", True))
    else:
        read_part(ObjectKind.MODEL, own, folder, index, map_location=map_location, **options)


def _warn_of_unread(folder: Path, contents: PreparedObjects, shown: Path) -> None:
    """Warn about states without a prepared object: the script may have forgotten its scheduler."""
    unread = []
    for name_of, objects in (
        (optimizer_name, contents.optimizers),
        (scheduler_name, contents.schedulers),
        (loader_name, contents.loaders),
    ):
        index = len(objects)
        while (folder / name_of(index)).is_file():
            unread.append(name_of(index))
            index += 1
    if unread:
        logger.warning("%s of %s: not loaded, because fewer objects are prepared.", ", ".join(unread), shown)


@contextmanager
def _fitting(folder: Path, item: object, changed: str = "") -> Iterator[None]:
    """A context that reports which object could not be restored, when its state does not fit.

    Args:
        folder: the checkpoint.
        item: the object, or its name.
        changed: a sentence on what is changed already.
    """
    try:
        yield
    except (AccelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = item if isinstance(item, str) else f"the state of {type(item).__name__}"
        raise CheckpointError(
            f"Cannot restore {what} from {folder}.",
            f"The saved state does not fit: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}.{changed}",
            "Load an older checkpoint, or create the objects with the same settings as when it was saved.",
        ) from error


Restored = tuple[Any, Any]
"""An object, and the state that it gets."""


def _loader_states(
    folder: Path, loaders: Sequence[Any], process: Process, allow_missing: bool, shown: Path
) -> Iterator[Restored]:
    for index, loader in enumerate(loaders):
        path = folder / loader_name(index)
        if not path.is_file() and (allow_missing or _never_saved(folder, loader, shown)):
            continue
        ranks_saved = 1 + len(list(folder.glob(loader_name(index, 1).replace("_rank1", "_rank*"))))
        same_world = ranks_saved == process.world_size
        yield loader, pickled.read(folder / loader_name(index, process.rank if same_world else 0))


def _never_saved(folder: Path, loader: Any, shown: Path) -> bool:
    """Whether a missing position is harmless: the original library saves one only for a loader that restores it."""
    foreign = not (folder / MANIFEST_NAME).is_file()
    if not foreign or getattr(loader, "restores", True):
        return False
    logger.warning("%s has no position of a loader; an epoch in random order starts with a new order.", shown)
    return True


def _scaler_state(folder: Path, scaler: Stateful | None, allow_missing: bool) -> Iterator[Restored]:
    path = folder / SCALER_NAME
    if scaler is not None and scaler.state_dict() and not (allow_missing and not path.is_file()):
        yield scaler, pickled.read(path)


def _guard_state(folder: Path, guard: Stateful | None) -> Iterator[Restored]:
    """The history of a guard; it begins anew where the saved run had none."""
    if guard is not None and (folder / STEP_GUARD_NAME).is_file():
        yield guard, pickled.read(folder / STEP_GUARD_NAME)


def _custom_states(folder: Path, custom: Sequence[Any], trusted: bool, allow_missing: bool) -> Iterator[Restored]:
    saved = len(list(folder.glob(custom_name(0).replace("_0", "_[0-9]*"))))
    if saved != len(custom) and not allow_missing:
        raise CheckpointError(
            f"Cannot load {len(custom)} registered objects from {folder}.",
            f"The checkpoint has {saved}.",
            "Register the same objects in the same order as when the checkpoint was saved, or pass "
            "allow_missing=('custom',).",
        )
    for index, item in enumerate(custom[:saved]):
        yield item, pickled.read(folder / custom_name(index), trusted=trusted)


def _read_extra_state(
    folder: Path, contents: PreparedObjects, strategy: Saver, process: Process, allow_missing: bool
) -> Any:
    """The extra state of the strategy; None if it has none."""
    if not strategy.overrides("extra_state"):
        return None
    path = folder / extra_state_name(process.rank)
    if path.is_file():
        return pickled.read(path)
    if strategy.extra_state(*_trained(contents)) and not allow_missing:
        raise CheckpointError(
            f"Cannot restore the extra state of {type(strategy).__name__} on process {process.rank} from {folder}.",
            f"There is no {path.name}: it was saved by fewer processes or with another backend.",
            "Resume with the same backend and number of processes, or pass allow_missing=('extra_state',).",
        )
    return None


def _random_states(folder: Path, process: Process, allow_missing: bool) -> tuple[int, dict[str, Any]]:
    """The step of the checkpoint, and the states of this process's generators."""
    path = folder / random_states_name(process.rank)
    ranks = sorted(int(match[1]) for file in folder.iterdir() if (match := _RANDOM_STATES.fullmatch(file.name)))
    if not allow_missing and (process.rank not in ranks or ranks[-1] >= process.world_size):
        raise CheckpointError(
            f"Cannot restore the random-number generators of process {process.rank} of {process.world_size} from "
            f"{folder}.",
            f"The checkpoint has {', '.join(map(random_states_name, ranks)) or 'none'}, so it was saved by another "
            "number of processes.",
            "Resume with the same number of processes, or pass allow_missing=('random_states',) to use new random "
            "states.",
        )
    with _fitting(folder, "the random-number generators"):
        if process.rank not in ranks:
            return int(pickled.read(folder / random_states_name(ranks[0]))["step"]) if ranks else 0, {}
        states = dict(pickled.read(path))
        step = int(states.pop("step", 0))
    if (missing := rng.missing_in(states)) and not allow_missing:
        raise CheckpointError(
            f"Cannot restore the random-number generators of process {process.rank} from {path}.",
            f"The checkpoint has no state of {', '.join(missing)}.",
            "Resume on the same kind of device, or pass allow_missing=('random_states',).",
        )
    return step, states
