"""The functions of `accelerate.utils.fsdp_utils` that save and load single sharded models and optimizers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.nn import Module

from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import FSDP_MODEL_NAME, sharded_model_name, shards_name
from accel_plugins.checkpoint.shards import read_into
from accel_plugins.fsdp import weights
from accel_plugins.layers import extract_model_from_parallel, strategy_model
from accel_plugins.manifest import ObjectKind
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import SettingError
from accel_state.settings.schema import member_name
from accelerate.legacy.weights import is_peft_model

Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a sharded model's weights in the format of the run's settings; called on every process.

    Args:
        fsdp_plugin: the settings of the run.
        accelerator: the Accelerator of the run.
        model: a prepared model.
        output_dir: the checkpoint folder; created if missing.
        model_index: index of the model among the prepared models.
        adapter_only: for a peft model, save only the active adapter, under peft's names.
        use_dcp: False writes one file of shards per process, which can be loaded only by the same number of processes.

    Raises:
        SettingError: `fsdp_plugin` differs from the settings of the run.
        CheckpointError: the weights cannot be written.
    """
    strategy = _strategy(accelerator, fsdp_plugin)
    model = strategy_model(model)
    state = strategy.collect(ObjectKind.MODEL, model)
    if adapter_only:
        state = {saved: state[own] for saved, own in _adapter_names(model, state).items()}
    _save(accelerator, ObjectKind.MODEL, state, output_dir, model_index, use_dcp)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Module,
    output_dir: Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the state of a sharded model's optimizer; called on every process. See `save_fsdp_model`."""
    state = _strategy(accelerator, fsdp_plugin).collect(ObjectKind.OPTIMIZER, optimizer)
    _save(accelerator, ObjectKind.OPTIMIZER, state, output_dir, optimizer_index, use_dcp)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the files that `save_fsdp_model` wrote, from the checkpoint or directly from its folder of shards.

    Raises:
        SettingError: `fsdp_plugin` differs from the settings of the run.
        CheckpointError: a file is missing or damaged, or belongs to another model or number of processes.
    """
    strategy, folder = _strategy(accelerator, fsdp_plugin), _checkpoint(input_dir)
    model = strategy_model(model)
    if adapter_only:
        _load_adapter(model, folder, model_index, _whole(fsdp_plugin), use_dcp)
    elif _whole(fsdp_plugin) or use_dcp:
        strategy.load(ObjectKind.MODEL, model, folder, model_index)
    else:
        weights.put_model(model, weights.read_rank_file(ObjectKind.MODEL, folder, model_index))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the files that `save_fsdp_optimizer` wrote; `adapter_only` does not change an optimizer's state.

    See `load_fsdp_model`.
    """
    strategy, folder = _strategy(accelerator, fsdp_plugin), _checkpoint(input_dir)
    model = strategy_model(model)
    if _whole(fsdp_plugin) or use_dcp:
        strategy.load(ObjectKind.OPTIMIZER, optimizer, folder, optimizer_index)
    else:
        state = weights.read_rank_file(ObjectKind.OPTIMIZER, folder, optimizer_index)
        weights.put_optimizer(model, inner_optimizer(optimizer), state)


def _save(accelerator: Any, kind: ObjectKind, state: dict[str, Any], folder: Folder, index: int, use_dcp: bool) -> None:
    strategy = accelerator.session.strategy
    if accelerator.is_main_process:
        os.makedirs(folder, exist_ok=True)
    accelerator.wait_for_everyone()
    if use_dcp or _whole(strategy.config):
        strategy.save(kind, state, Path(folder), index)
    else:
        weights.write_rank_file(kind, state, Path(folder), index)


def _load_adapter(model: Module, folder: Path, index: int, whole: bool, use_dcp: bool) -> None:
    own = weights.model_state(model, full=False)
    names = _adapter_names(model, own)
    if whole:
        saved = pickled.read(folder / sharded_model_name(index))
    elif use_dcp:
        saved = {name: own[original] for name, original in names.items()}
        read_into({ObjectKind.MODEL.value: saved}, folder / shards_name(FSDP_MODEL_NAME, index))
    else:
        saved = weights.read_rank_file(ObjectKind.MODEL, folder, index)
    renamed = {names.get(name, name): value for name, value in saved.items()}
    put = weights.put_full_weights if whole else weights.put_model
    put(model, renamed, strict=False)


def _adapter_names(model: Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Names in the model by the names under which peft saves the active adapter; all names without peft."""
    if not is_peft_model(model):
        return {name: name for name in state}
    library: Any = importlib.import_module("peft")
    bare: Any = extract_model_from_parallel(model)
    kept = library.get_peft_model_state_dict(bare, state_dict=dict(state), adapter_name=bare.active_adapter)
    originals = {id(value): name for name, value in state.items()}
    return {saved: originals[id(value)] for saved, value in kept.items()}


def _strategy(accelerator: Any, plugin: Any) -> Any:
    strategy = accelerator.session.strategy
    own = getattr(strategy, "config", None)
    if getattr(own, "state_dict_type", None) != plugin.state_dict_type:
        raise SettingError(
            "Cannot save or load a model or an optimizer of FSDP.",
            f"The given settings have state_dict_type={plugin.state_dict_type!r}, but those of the run do not.",
            "Give accelerator.state.fsdp_plugin.",
        )
    return strategy


def _whole(settings: Any) -> bool:
    return bool(member_name(settings.state_dict_type) == "FULL_STATE_DICT")


def _checkpoint(folder: Folder) -> Path:
    """The checkpoint folder; `folder` may also be its folder of shards."""
    path = Path(folder)
    return path.parent if (path / ".metadata").is_file() else path
