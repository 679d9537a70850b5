"""Checkpoints of sharded models and optimizers: in one file, or in one file of shards per process.

The folders of shards are those of `torch.distributed.checkpoint`, which load on another number of processes. What a
backend wrote that does not shard is loaded too.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.nn import Module
from torch.optim import Optimizer

from accel_bigmodel.load import load_checkpoint_in_model
from accel_bigmodel.loading import holds_sharded_weights
from accel_bigmodel.weight_files import load_weights_file
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    optimizer_name,
    sharded_model_name,
    shards_name,
    weights_name,
)
from accel_plugins.checkpoint.optimizer_names import by_name, names_parameters, restart, unstepped
from accel_plugins.checkpoint.shards import PortableWriter, names_in, read_into, read_whole
from accel_plugins.fsdp import loading
from accel_plugins.manifest import Part
from accel_state.errors import CheckpointError

__all__ = (
    "load_model",
    "load_optimizer",
    "model_state",
    "optimizer_state",
    "put_model",
    "put_optimizer",
    "write",
)

_STEMS = {Part.MODEL: FSDP_MODEL_NAME, Part.OPTIMIZER: OPTIMIZER_NAME}


def model_state(model: Module, *, full: bool, to_host: bool = True) -> dict[str, Any]:
    """Weights by name: whole, on the first process and in host memory; or the shards of this process.

    Args:
        model: a sharded model.
        full: whether they are put together.
        to_host: False leaves whole weights where they are, on every process.
    """
    options = StateDictOptions(full_state_dict=full, cpu_offload=full and to_host)
    return dict(get_model_state_dict(model, options=options))


def optimizer_state(model: Module, optimizer: Optimizer, *, full: bool, to_host: bool = True) -> dict[str, Any]:
    """State of an optimizer by names of parameters, as `model_state`."""
    if not optimizer.state:
        # torch would let the optimizer step once to have a state, and so change what training goes on with.
        return unstepped(optimizer, [model])
    options = StateDictOptions(full_state_dict=full, cpu_offload=full and to_host)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def write(
    part: Part,
    state: dict[str, Any],
    folder: Path,
    index: int,
    *,
    full: bool,
    first: bool,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Write what `model_state` or `optimizer_state` returned; called on every process.

    Args:
        part, state, folder, index: as `Strategy.save`.
        full: the state is whole, and the first process writes it.
        first: whether this is the first process.
        group: on which processes agree about shards, apart from training's.
    """
    if full:
        if first:
            pickled.write(state, folder / _full_name(part, index))
        return
    try:
        writer = PortableWriter(folder / shards_name(_STEMS[part], index))
        save_shards({part.value: state}, storage_writer=writer, process_group=group)
    except (Exception, CheckpointException) as error:  # whatever another process met comes wrapped
        raise CheckpointError(
            f"Cannot save {part.value} {index} in {folder}.",
            str(error).strip().splitlines()[-1],
            "Check the free space and the permissions of the folder.",
        ) from error


def load_model(model: Module, folder: Path, index: int, *, strict: bool = True) -> None:
    """Read the weights of a model, from shards or from one file, whichever is there.

    Of a safetensors file each process reads the ranges that it holds.
    """
    sharded, whole = folder / shards_name(FSDP_MODEL_NAME, index), folder / sharded_model_name(index)
    if sharded.is_dir():
        state = model_state(model, full=False)
        read_into({Part.MODEL.value: state}, sharded)
        put_model(model, state, strict=strict)
        return
    plain = next((path for safe in (True, False) if (path := folder / weights_name(safe, index)).is_file()), None)
    if plain is not None and holds_sharded_weights(model):
        load_checkpoint_in_model(model, plain, strict=strict)
        return
    # Mapped, so that each process reads no more than the pages of its shards.
    mapped = {"mmap": zipfile.is_zipfile(whole)} if plain is None else {}
    weights = pickled.read(whole, **mapped) if plain is None else _with_ties(model, load_weights_file(plain))
    loading.put(model, weights, strict=strict)


def put_model(model: Module, shards: dict[str, Any], *, strict: bool = True) -> None:
    """Give a model the shards of this process."""
    set_model_state_dict(model, shards, options=StateDictOptions(strict=strict))


def _with_ties(model: Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights with all names of those that have several: a safetensors file keeps the first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        given = next((weights[name] for name in tied if name in weights), None)
        if given is not None:
            weights.update({name: given for name in tied if name not in weights})
    return weights


def load_optimizer(model: Module, optimizer: Optimizer, folder: Path, index: int) -> None:
    """Read the state of an optimizer, from shards or from one file, whichever is there."""
    sharded = folder / shards_name(OPTIMIZER_NAME, index)
    full = not sharded.is_dir()
    if full:
        state = pickled.read(folder / optimizer_name(index))
        state = state if names_parameters(state) else by_name(state, optimizer, [model])
    elif any(name.startswith(f"{Part.OPTIMIZER.value}.state.") for name in names_in(sharded)):
        state = dict(get_optimizer_state_dict(model, optimizer))
        read_into({Part.OPTIMIZER.value: state}, sharded)
    else:
        state = {"state": {}, **read_whole(sharded)[Part.OPTIMIZER.value]}
    put_optimizer(model, optimizer, state, full=full)


def put_optimizer(model: Module, optimizer: Optimizer, state: dict[str, Any], *, full: bool = False) -> None:
    """Give an optimizer its state by names of parameters: whole, or the shards of this process."""
    if not state["state"]:
        restart(optimizer, state)
        return
    options = StateDictOptions(full_state_dict=full)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _full_name(part: Part, index: int) -> str:
    return optimizer_name(index) if part is Part.OPTIMIZER else sharded_model_name(index)
