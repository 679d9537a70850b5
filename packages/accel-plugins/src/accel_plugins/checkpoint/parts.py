"""Models, optimizers and schedulers as files, for every strategy whose state is complete on each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from accel_bigmodel import weight_files
from accel_bigmodel.failed_load import LoadGuard, load_guard
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    optimizer_name,
    scheduler_name,
    sharded_model_name,
    shards_name,
    weights_name,
)
from accel_plugins.checkpoint.in_place import MappedState, read_weights
from accel_plugins.checkpoint.optimizer_names import by_position, names_parameters
from accel_plugins.manifest import Part
from accel_state.errors import CheckpointError

__all__ = ("load_into_model", "plain_state_dict", "read_part", "write_part")

_NAMES = {Part.OPTIMIZER: optimizer_name, Part.SCHEDULER: scheduler_name}


def plain_state_dict(model: Module) -> dict[str, Tensor]:
    """The state dict of a module under the names its author gave, whatever was compiled inside of it."""
    return {_uncompiled(name): value for name, value in model.state_dict().items()}


def _uncompiled(name: str) -> str:
    return name.replace("_orig_mod.", "")


def write_part(part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
    """Write the state of one object under its name of `checkpoint.files`.

    Raises:
        CheckpointError: it cannot be written.
    """
    if part is Part.MODEL:
        weight_files.save_weights_file(state, folder / weights_name(safe_serialization, index))
    else:
        pickled.write(state, folder / _NAMES[part](index))


def read_part(
    part: Part,
    item: Any,
    folder: Path,
    index: int,
    *,
    map_location: Any = "cpu",
    strict: bool = True,
    models: Sequence[Module] = (),
    **options: Any,
) -> None:
    """Read a file of `checkpoint.files` into an object; also one that a backend wrote which shards.

    On a CPU the file is read into the memory that parameters and the state of an optimizer have, so whoever still holds
    a state of that optimizer, uncopied, sees it change.

    Args:
        part: kind of the object.
        item: the object; of a model, the user's.
        folder: the checkpoint.
        index: which one of its kind.
        map_location: where tensors are read to, before they go to where the object has its own.
        strict: of models, whether names must agree.
        models: of optimizers, the user's models, for states that name their parameters.
        options: for `Module.load_state_dict`.

    Raises:
        CheckpointError: the file is missing or damaged, or it is that of another object.
    """
    if part is Part.MODEL:
        with load_guard(item, folder) as guard:
            in_place = not options.get("assign", False)
            weights = _weights(item, folder, index, map_location or "cpu", guard, in_place=in_place)
            load_into_model(item, weights, strict=strict, where=str(folder), **options)
        return
    path = folder / _NAMES[part](index)
    if part is Part.OPTIMIZER:
        state = _optimizer_state(item, folder, index, map_location or "cpu", models)
    else:
        state = pickled.read(path, map_location or "cpu")
    try:
        item.load_state_dict(state)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"Cannot load {path.name} of {folder} into {type(item).__name__}.",
            f"It is the state of another {part.value}: {error}",
            "Prepare the same objects in the same order as when it was saved.",
        ) from error


def _weights(
    model: Module, folder: Path, index: int, map_location: Any, guard: LoadGuard, *, in_place: bool
) -> dict[str, Any]:
    """All weights of a model, from whichever file or folder holds them."""
    candidates = [folder / weights_name(safe, index) for safe in (True, False)]
    safe = candidates[0]
    if safe.is_file() and in_place and map_location == "cpu":
        own = model.state_dict(keep_vars=True)
        return read_weights(safe, {_uncompiled(name): value for name, value in own.items()}, guard)
    found = next((path for path in candidates if path.is_file()), None)
    if found is not None:
        return weight_files.load_weights_file(found, map_location)
    whole, sharded = folder / sharded_model_name(index), folder / shards_name(FSDP_MODEL_NAME, index)
    if whole.is_file():
        weights: dict[str, Any] = pickled.read(whole, map_location)
        return weights
    if sharded.is_dir():
        from accel_plugins.checkpoint.shards import read_whole

        return dict(read_whole(sharded)["model"])
    raise CheckpointError(
        f"Cannot load model {index} from {folder}.",
        f"None of {', '.join(path.name for path in (*candidates, whole, sharded))} is there.",
        "Prepare as many models as when it was saved, or name another folder.",
    )


def _optimizer_state(optimizer: Any, folder: Path, index: int, map_location: Any, models: Sequence[Module]) -> Any:
    """The state of an optimizer, with its parameters by position."""
    sharded = folder / shards_name(OPTIMIZER_NAME, index)
    if sharded.is_dir() and not (folder / optimizer_name(index)).is_file():
        from accel_plugins.checkpoint.shards import read_whole

        return _positioned(read_whole(sharded)["optimizer"], optimizer, models)
    path = folder / optimizer_name(index)
    if map_location != "cpu":
        return _positioned(pickled.read(path, map_location), optimizer, models)
    mapped = MappedState(path)
    state, own = _positioned(mapped.state, optimizer, models), optimizer.state_dict()
    return mapped.read(state, own if _group_sizes(own) == _group_sizes(state) else None)


def _positioned(state: Any, optimizer: Any, models: Sequence[Module]) -> Any:
    """The state with its parameters by position."""
    if isinstance(state, Mapping) and "param_groups" in state and names_parameters(state):
        return by_position(state, getattr(optimizer, "optimizer", optimizer), models)
    return state


def _group_sizes(state: Any) -> list[int] | None:
    """Numbers of parameters in the groups, which differ between optimizers that are not the same."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return None if groups is None else [len(group["params"]) for group in groups]


def load_into_model(
    model: Module, weights: Mapping[str, Tensor], *, strict: bool = True, where: str = "", **options: Any
) -> None:
    """Load weights under the names of the user's model; names that are tied to a given one need not be given.

    Raises:
        CheckpointError: names or shapes do not agree.
    """
    own = model.state_dict()
    known = {_uncompiled(name): name for name in own}
    renamed = {known.get(name, name): value for name, value in weights.items()}
    for names in weight_files.tied_names(own):
        given = next((renamed[name] for name in names if name in renamed), None)
        if given is not None:
            renamed.update({name: given for name in names if name not in renamed})
    try:
        model.load_state_dict(renamed, strict=strict, **options)
    except RuntimeError as error:
        raise CheckpointError(
            f"Cannot load weights{f' of {where}' if where else ''} into {type(model).__name__}.",
            str(error),
            "Build the model with the configuration it was saved with, or pass strict=False to load what agrees.",
        ) from error
