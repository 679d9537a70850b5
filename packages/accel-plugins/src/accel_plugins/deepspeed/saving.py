"""Checkpoints and weights of an engine; it writes its files by itself, in folders named as the original names them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from accel_ops import gather_object
from accel_plugins.checkpoint import pickled
from accel_state.current import Process
from accel_state.errors import AccelError, CheckpointError, NotOffered, NotReady

__all__ = ("load_engine", "put_weights", "save_engine", "tag_of", "whole_weights")

_CLASSES: Final = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""What files of DeepSpeed hold besides tensors and plain data."""

_OPTIMIZER_FILE: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")


def tag_of(index: int) -> str:
    """Name of the folder for the model with this index."""
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def save_engine(engine: Any, folder: Path, index: int) -> None:
    """Let an engine write its model, optimizer and schedule; called on every process."""
    engine.save_checkpoint(str(folder), tag_of(index))


def load_engine(engine: Any, folder: Path, index: int, process: Process, strict: bool = True) -> None:
    """Let an engine read what `save_engine` wrote; called on every process.

    DeepSpeed unpickles its files, so they are looked through before, each by one process, and nothing in them is run.

    Raises:
        CheckpointError: files are missing, damaged, hold code, or belong to another stage or number of processes.
    """
    place = folder / tag_of(index)
    _agreed(process, lambda: _look_through(engine, place, process))
    path, _ = engine.load_checkpoint(str(folder), tag_of(index), load_module_strict=strict)
    if path is None:
        raise CheckpointError(
            f"The DeepSpeed checkpoint {place} was to be loaded.",
            "DeepSpeed did not find its files.",
            "Load an older checkpoint.",
        )


def _agreed(process: Process, look: Any) -> None:
    """Run a check on every process; what fails on one fails on all, so that nobody waits for it."""
    failure: AccelError | None = None
    try:
        look()
    except AccelError as error:
        failure = error
    failures = [error for error in gather_object([failure]) if error is not None]
    if failures:
        raise failure or failures[0]


def _look_through(engine: Any, place: Path, process: Process) -> None:
    asked = f"The DeepSpeed checkpoint {place} was to be loaded."
    files = sorted(place.glob("*.pt")) if place.is_dir() else []
    if not files:
        raise CheckpointError(asked, "There is no such folder with files of DeepSpeed.", "Name another checkpoint.")
    parts = [file for file in files if _OPTIMIZER_FILE.search(file.name)]
    if parts and len(parts) != process.world_size:
        raise CheckpointError(
            asked,
            f"It was written by {len(parts)} processes, and these are {process.world_size}.",
            f"Start {len(parts)} processes, or convert it with DeepSpeed's universal checkpoints.",
        )
    for position, file in enumerate(files):
        if position % process.world_size != process.rank:
            continue
        with torch.serialization.safe_globals(list(_CLASSES)):
            state = pickled.read(file, map_location="meta")
        if _OPTIMIZER_FILE.search(file.name):
            _check_stage(asked, state, engine)


def _check_stage(asked: str, state: Any, engine: Any) -> None:
    held = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    stage = held.get("zero_stage") if isinstance(held, Mapping) else None
    ours = int(engine.zero_optimization_stage())
    if stage is not None and int(stage) != ours:
        raise CheckpointError(
            asked,
            f"It was written with ZeRO stage {int(stage)}, and this run has stage {ours}.",
            f"Use zero_stage={int(stage)}, or convert it with the script zero_to_fp32.py that lies beside it.",
        )


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """All weights of an engine's model on the process that writes; called on every process.

    Raises:
        NotReady: they are divided, and gathering them was not asked for.
    """
    if int(engine.zero_optimization_stage()) < 3:
        weights: dict[str, Tensor] = engine.module.state_dict()
        return weights
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise NotReady(
            "The weights of a model were asked for that ZeRO stage 3 divides.",
            "Gathering them when the model is saved is switched off.",
            "Set DeepSpeedPlugin(zero3_save_16bit_model=True), or use the script zero_to_fp32.py on a checkpoint.",
        )
    gathered: dict[str, Tensor] | None = engine._zero3_consolidated_16bit_state_dict()
    return gathered or {}


def put_weights(engine: Any, weights: Mapping[str, Tensor], strict: bool) -> None:
    """Put whole weights into an engine's model, and into the copies that its optimizer keeps.

    Raises:
        NotOffered: parameters are divided.
    """
    if int(engine.zero_optimization_stage()) >= 3:
        raise NotOffered(
            "Weights were to be put into a model that ZeRO stage 3 divides.",
            "DeepSpeed reads them while the model is built, or from a checkpoint of its own.",
            "Load them before prepare().",
        )
    engine.module.load_state_dict(weights, strict=strict)
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()
