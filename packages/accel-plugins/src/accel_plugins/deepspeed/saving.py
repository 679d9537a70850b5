"""Checkpoints and weights of an engine; it writes its files by itself, in folders named as the original names them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from accel_ops.agreement import raise_on_any_rank
from accel_plugins.checkpoint import pickled
from accel_state.current import Process
from accel_state.errors import CheckpointError, NotOffered, NotReady, SettingError

__all__ = ("LOAD_OPTIONS", "load_engine", "put_engine_weights", "save_engine", "tag_of", "whole_weights")

LOAD_OPTIONS: Final = {
    "strict": "load_module_strict",
    "load_module_strict": "load_module_strict",
    "load_optimizer_states": "load_optimizer_states",
    "load_lr_scheduler_states": "load_lr_scheduler_states",
    "load_module_only": "load_module_only",
    "custom_load_fn": "custom_load_fn",
}
"""Options of DeepSpeed's `load_checkpoint`, by the names under which `load_state` is given them."""

_CLASSES: Final = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""What files of DeepSpeed hold besides tensors and plain data."""

_UNIVERSAL: Final = "_universal"
_SETTING: Final = '"checkpoint": {"load_universal": true}'

_PART: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(optim|model)_states\.pt$")


def tag_of(index: int) -> str:
    """Name of the folder for the model with this index."""
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def save_engine(engine: Any, folder: Path, index: int, options: Mapping[str, Any]) -> None:
    """Let an engine write its model, optimizer and schedule; called on every process.

    Args:
        engine: of DeepSpeed.
        folder: of the checkpoint.
        index: of the model.
        options: of the manifest's `save_options`.
    """
    engine.save_checkpoint(str(folder), tag_of(index), **options)


def load_engine(engine: Any, folder: Path, index: int, process: Process, options: Mapping[str, Any]) -> dict[str, Any]:
    """Let an engine read what `save_engine` wrote; called on every process.

    DeepSpeed unpickles its files, so they are looked through before, each by one process, and nothing in them is run.

    Args:
        engine: of DeepSpeed.
        folder: of the checkpoint.
        index: of the model.
        process: who this process is.
        options: of `LOAD_OPTIONS`.

    Returns:
        What was saved as `client_state`.

    Raises:
        SettingError: DeepSpeed has no such option.
        CheckpointError: files are missing, damaged, hold code, or belong to another stage or number of processes.
    """
    unknown = sorted(options.keys() - LOAD_OPTIONS.keys())
    if unknown:
        raise SettingError(
            f"load_state() was given {', '.join(unknown)}.",
            "DeepSpeed has no such options for loading.",
            f"Leave them out; it knows {', '.join(LOAD_OPTIONS)}.",
        )
    place = folder / tag_of(index)
    if engine.load_universal_checkpoint():
        place = _universal(place)
    whole = not options.get("load_module_only") and options.get("load_optimizer_states", True)
    raise_on_any_rank(
        process,
        "deepspeed",
        lambda: _look_through(engine, place, process, bool(whole)),
        f"Cannot load the DeepSpeed checkpoint {place}.",
        error=CheckpointError,
    )
    arguments = {LOAD_OPTIONS[name]: value for name, value in options.items()}
    path, client_state = engine.load_checkpoint(str(folder), place.name, **arguments)
    if path is None:
        raise CheckpointError(
            f"Cannot load the DeepSpeed checkpoint {place}.",
            "DeepSpeed did not find its files.",
            "Load an older checkpoint.",
        )
    return dict(client_state or {})


def _universal(place: Path) -> Path:
    """The folder that DeepSpeed's converter made of another.

    Raises:
        CheckpointError: there is none.
    """
    for folder in (place.with_name(f"{place.name}{_UNIVERSAL}"), place):
        if (folder / "zero").is_dir():
            return folder
    raise CheckpointError(
        f"Cannot load the universal DeepSpeed checkpoint of {place} (checkpoint.load_universal).",
        "It was not converted.",
        f"Run: {_conversion(place)}",
    )


def _conversion(place: Path) -> str:
    """The command that makes a universal checkpoint."""
    return (
        f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {place} "
        f"--output_folder {place}{_UNIVERSAL}"
    )


def _look_through(engine: Any, place: Path, process: Process, optimizer: bool) -> None:
    """Refuse files that do not fit or hold code; each is read by one process.

    Args:
        engine: reads them afterwards.
        place: their folder.
        process: who this process is.
        optimizer: whether the states of the optimizer are to be read, too.
    """
    asked = f"Cannot load the DeepSpeed checkpoint {place}."
    files = sorted(place.rglob("*.pt")) if place.is_dir() else []
    if not files:
        raise CheckpointError(asked, "There is no such folder with files of DeepSpeed.", "Name another checkpoint.")
    ours = int(engine.zero_optimization_stage())
    anything_fits = engine.load_universal_checkpoint() or not (optimizer or ours == 3)
    if not anything_fits:
        _check_writers(asked, place, files, ours, process.world_size)
    for file in files[process.rank :: process.world_size]:
        with torch.serialization.safe_globals(list(_CLASSES)):
            state = pickled.read(file, map_location="meta")
        found = _PART.search(file.name)
        if found and found[2] == "optim" and not anything_fits:
            _check_stage(asked, place, state, ours)


def _check_writers(asked: str, place: Path, files: Sequence[Path], ours: int, processes: int) -> None:
    found = [part for file in files if (part := _PART.search(file.name))]
    writers = {part[1] for part in found}
    if writers and len(writers) != processes:
        raise CheckpointError(
            asked,
            f"It was written by {len(writers)} processes, and these are {processes}.",
            f"Start {len(writers)} processes, or convert it by {_conversion(place)} and load it with {_SETTING} in the "
            "configuration of DeepSpeed.",
        )
    if ours and not any(part[2] == "optim" for part in found):
        raise _other_stage(asked, place, 0, ours)


def _check_stage(asked: str, place: Path, state: Any, ours: int) -> None:
    held = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    stage = held.get("zero_stage") if isinstance(held, Mapping) else None
    if stage is not None and int(stage) != ours:
        raise _other_stage(asked, place, int(stage), ours)


def _other_stage(asked: str, place: Path, theirs: int, ours: int) -> CheckpointError:
    return CheckpointError(
        asked,
        f"It was written with ZeRO stage {theirs}, and this run has stage {ours}.",
        f"Use zero_stage={theirs}, convert it by {_conversion(place)} and load it with {_SETTING} in the configuration "
        "of DeepSpeed, or take the weights alone with the script zero_to_fp32.py beside it.",
    )


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """All weights of an engine's model on the process that writes; called on every process.

    Raises:
        NotReady: they are sharded, and the settings do not gather them.
    """
    if int(engine.zero_optimization_stage()) < 3:
        weights: dict[str, Tensor] = engine.module.state_dict()
        return weights
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise NotReady(
            "Cannot read the weights of a model that ZeRO stage 3 shards.",
            "Gathering them when the model is saved is switched off.",
            "Set DeepSpeedPlugin(zero3_save_16bit_model=True), or use the script zero_to_fp32.py on a checkpoint.",
        )
    gathered: dict[str, Tensor] | None = engine._zero3_consolidated_16bit_state_dict()
    return gathered or {}


def put_engine_weights(engine: Any, weights: Mapping[str, Tensor], strict: bool) -> None:
    """Put whole weights into an engine's model, and into the copies that its optimizer keeps.

    Raises:
        NotOffered: parameters are divided.
    """
    if int(engine.zero_optimization_stage()) >= 3:
        raise NotOffered(
            "Cannot load weights into a model that ZeRO stage 3 shards.",
            "DeepSpeed reads them while the model is built, or from a checkpoint of its own.",
            "Load them before prepare().",
        )
    engine.module.load_state_dict(weights, strict=strict)
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()
