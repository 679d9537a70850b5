"""The functions of `accelerate.checkpointing`: the contents of one folder, without the commit of `save_state`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_ops import rng
from accel_plugins.checkpoint import parts, pickled
from accel_plugins.checkpoint.files import SCALER_NAME, custom_name, loader_name, random_states_name
from accel_plugins.manifest import ObjectKind
from accel_state import current

__all__ = ("load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state")

Folder = str | os.PathLike[str]


def save_accelerator_state(
    output_dir: Folder,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write states into a folder that exists; called on every process.

    Raises:
        CheckpointError: something cannot be written.
    """
    folder = Path(output_dir)
    if _writes(save_on_each_node):
        states = {
            ObjectKind.MODEL: model_states,
            ObjectKind.OPTIMIZER: [optimizer.state_dict() for optimizer in optimizers],
            ObjectKind.SCHEDULER: [scheduler.state_dict() for scheduler in schedulers],
        }
        for kind, each in states.items():
            for index, state in enumerate(each):
                parts.write_part(kind, state, folder, index, safe_serialization=safe_serialization)
        if scaler is not None:
            pickled.write(scaler.state_dict(), folder / SCALER_NAME)
    for index, loader in enumerate(dataloaders):
        if hasattr(loader, "state_dict"):
            pickled.write(loader.state_dict(), folder / loader_name(index, process_index))
    pickled.write({"step": step, **rng.snapshot()}, folder / random_states_name(process_index))
    return folder


def load_accelerator_state(
    input_dir: Folder,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read states from a folder; called on every process.

    Returns:
        The values of the Accelerator itself: its step.

    Raises:
        CheckpointError: a file is missing, damaged, or belongs to another object.
    """
    folder = Path(input_dir)
    for kind, each in (
        (ObjectKind.MODEL, models),
        (ObjectKind.OPTIMIZER, optimizers),
        (ObjectKind.SCHEDULER, schedulers),
    ):
        options = {**(load_kwargs or {}), **load_model_func_kwargs} if kind is ObjectKind.MODEL else {}
        for index, item in enumerate(each):
            parts.read_part(kind, item, folder, index, map_location=map_location or "cpu", **options)
    for index, loader in enumerate(dataloaders):
        path = folder / loader_name(index, process_index)
        if hasattr(loader, "load_state_dict") and path.is_file():
            loader.load_state_dict(pickled.read(path))
    if scaler is not None:
        scaler.load_state_dict(pickled.read(folder / SCALER_NAME))
    states = dict(pickled.read(folder / random_states_name(process_index)))
    step = states.pop("step", 0)
    rng.restore(states)
    return {"step": step}


def save_custom_state(obj: Any, path: Folder, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of a registered object as `custom_checkpoint_<index>.pkl`, on the main process only."""
    if _writes(save_on_each_node):
        pickled.write(obj.state_dict(), Path(path) / custom_name(index))


def load_custom_state(obj: Any, path: Folder, index: int = 0) -> None:
    """Read the state of a registered object.

    Raises:
        CheckpointError: the file is missing or damaged, or contains more than plain data.
    """
    obj.load_state_dict(pickled.read(Path(path) / custom_name(index)))


def _writes(save_on_each_node: bool) -> bool:
    topology = current.process_or_start().topology
    return topology.is_local_main if save_on_each_node else topology.rank == 0
