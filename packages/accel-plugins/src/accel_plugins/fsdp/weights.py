"""Checkpoints of sharded models and optimizers: in one file, or in one file of shards per process.

The folders of shards are those of `torch.distributed.checkpoint`, which load on another number of processes. torch
reads their `.metadata`, and the numbers among the tensors, with pickle; both are checked by a reader that knows
nothing but plain data before torch gets to see them.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.nn import Module
from torch.optim import Optimizer

from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.allowed import check_metadata
from accel_plugins.checkpoint.files import FSDP_MODEL_NAME, OPTIMIZER_NAME, optimizer_name
from accel_plugins.fsdp import loading
from accel_plugins.manifest import Part
from accel_state.errors import AccelError, CheckpointError

__all__ = ("load_model", "load_optimizer", "model_state", "optimizer_state", "write")

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
        save_shards({part.value: state}, checkpoint_id=_sharded(part, folder, index), process_group=group)
    except Exception as error:  # whatever another process met comes wrapped
        raise CheckpointError(
            f"{part.value} {index} was to be saved in {folder}.",
            str(error).strip().splitlines()[-1],
            "Check the free space and the permissions of the folder.",
        ) from error


def load_model(model: Module, folder: Path, index: int, *, strict: bool = True) -> None:
    """Read the weights of a model, from shards or from one file, whichever is there."""
    if _sharded(Part.MODEL, folder, index).is_dir():
        state = model_state(model, full=False)
        _read_shards(Part.MODEL, state, folder, index)
        set_model_state_dict(model, state, options=StateDictOptions(strict=strict))
        return
    loading.put(model, pickled.read(folder / _full_name(Part.MODEL, index)), strict=strict)


def load_optimizer(model: Module, optimizer: Optimizer, folder: Path, index: int) -> None:
    """Read the state of an optimizer, from shards or from one file, whichever is there."""
    full = not _sharded(Part.OPTIMIZER, folder, index).is_dir()
    if full:
        state = pickled.read(folder / _full_name(Part.OPTIMIZER, index))
    else:
        state = optimizer_state(model, optimizer, full=False)
        _read_shards(Part.OPTIMIZER, state, folder, index)
    options = StateDictOptions(full_state_dict=full)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _full_name(part: Part, index: int) -> str:
    if part is Part.OPTIMIZER:
        return optimizer_name(index)
    return f"{FSDP_MODEL_NAME}_{index}.bin" if index else f"{FSDP_MODEL_NAME}.bin"


def _sharded(part: Part, folder: Path, index: int) -> Path:
    return folder / f"{_STEMS[part]}_{index}"


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Refuses values among the tensors that are more than plain data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        pickled.read_bytes(value, read_item.dest_index.fqn)
        value.seek(0)
        super().load_bytes(read_item, value)


def _read_shards(part: Part, state: dict[str, Any], folder: Path, index: int) -> None:
    source = _sharded(part, folder, index)
    check_metadata(source / ".metadata")
    try:
        load_shards({part.value: state}, checkpoint_id=source, planner=_PlainLoadPlanner())
    except AccelError:
        raise
    except Exception as error:  # a damaged file can make its reader raise anything
        raise CheckpointError(
            f"{source.name} of {folder} was to be loaded.",
            f"It is damaged or belongs to another {part.value}: {str(error).strip().splitlines()[-1]}",
            "Load an older checkpoint, or build what it was saved from.",
        ) from error
