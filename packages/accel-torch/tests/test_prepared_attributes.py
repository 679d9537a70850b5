"""Attributes that other libraries read, pop from and assign show the prepared objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.errors import Conflict, SettingError
from accel_torch import (
    Accelerator,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    ProjectConfiguration,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


def prepared() -> tuple[Accelerator, Any, Any, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(2, 1)))
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def test_they_show_what_was_prepared() -> None:
    accelerator, model, optimizer, scheduler, loader = prepared()
    assert accelerator._models == [model]
    assert accelerator._optimizers == [optimizer]
    assert accelerator._schedulers == [scheduler]
    assert accelerator._dataloaders == [loader]
    assert accelerator._custom_objects == []


def test_what_is_popped_is_gone_from_checkpoints(tmp_path: Path) -> None:
    accelerator, _, optimizer, _, _ = prepared()
    assert accelerator._optimizers.pop() is optimizer
    assert not accelerator.optimizer_step_was_skipped
    accelerator.save_state(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "optimizer.bin").exists()
    assert (tmp_path / "saved" / "scheduler.bin").exists()


def test_models_that_are_assigned_or_appended_are_saved(tmp_path: Path) -> None:
    accelerator, model, _, _, _ = prepared()
    accelerator._models = [model, nn.Linear(2, 2)]
    accelerator._models.append(nn.Linear(3, 3))
    accelerator.save_state(str(tmp_path / "saved"))
    saved = {path.name for path in (tmp_path / "saved").glob("*.safetensors")}
    assert saved == {"model.safetensors", "model_1.safetensors", "model_2.safetensors"}
    accelerator.free_memory()
    assert accelerator._models == []


def test_hooks_and_objects_for_checkpoints() -> None:
    accelerator = prepared()[0]
    handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    accelerator.register_load_state_pre_hook(lambda models, folder: None)
    kept = nn.Linear(1, 1)
    accelerator.register_for_checkpointing(kept)
    assert len(accelerator._save_model_state_pre_hook) == len(accelerator._load_model_state_pre_hook) == 1
    assert accelerator._custom_objects == [kept]
    handle.remove()
    assert len(accelerator._save_model_state_pre_hook) == 0


def test_an_engine_may_be_assigned() -> None:
    accelerator = prepared()[0]
    assert accelerator.deepspeed_engine_wrapped is None
    engine = object()
    accelerator.deepspeed_engine_wrapped = engine
    assert accelerator.deepspeed_engine_wrapped is engine
    accelerator.free_memory()
    assert accelerator.deepspeed_engine_wrapped is None


def test_settings_objects_that_were_given() -> None:
    given = [AutocastKwargs(cache_enabled=False), GradScalerKwargs(), DistributedDataParallelKwargs()]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=given)
    assert [accelerator.autocast_handler, accelerator.scaler_handler, accelerator.ddp_handler] == given
    assert accelerator.init_handler is None
    assert accelerator.profile_handler is None
    assert accelerator.native_amp


def test_plugins_of_the_state_may_be_assigned() -> None:
    accelerator = Accelerator(cpu=True)
    assert not accelerator.native_amp
    assert not hasattr(accelerator.state, "fsdp_plugin")
    assert accelerator.deepspeed_plugin is None
    plugin = object()
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.deepspeed_plugin = {"one": plugin}
    assert Accelerator(cpu=True).state.fsdp_plugin is plugin
    assert accelerator.state.deepspeed_plugins == {"one": plugin}
    assert accelerator.deepspeed_plugin is plugin
    accelerator.state.fsdp_plugin = None
    assert accelerator.state.fsdp_plugin is None


def test_two_spellings_of_one_argument() -> None:
    with pytest.raises(Conflict, match="two names of one argument"):
        Accelerator(cpu=True, deepspeed_plugin=object(), deepspeed_plugins=object())


def test_a_device_map_is_found_wherever_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    inner = nn.Linear(1, 1)
    model = nn.Sequential(inner)
    assert not accelerator.verify_device_map(model)
    inner.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    assert not accelerator.verify_device_map(model)
    inner.hf_device_map = {"a": "cpu", "b": "disk"}  # type: ignore[assignment]
    assert accelerator.verify_device_map(model)


def test_a_prepared_loader_is_adapted_already() -> None:
    accelerator, model, _, _, loader = prepared()
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader
    plain = DataLoader(TensorDataset(torch.ones(2, 1)))
    assert list(accelerator.deepspeed_ulysses_dl_adapter(plain, model))


def test_settings_of_8_bits_that_were_given() -> None:
    accelerator = Accelerator(cpu=True)
    assert not accelerator.has_fp8_handler
    assert not accelerator.fp8_enabled
    recipe = FP8RecipeKwargs(backend="TE")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[recipe])
    assert accelerator.fp8_recipe_handler is recipe
    assert accelerator.has_fp8_handler
    assert accelerator.ao_recipe_handler is None


def test_the_project_configuration_may_be_assigned(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.project_configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    assert accelerator.project_dir == str(tmp_path)
    accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_0").is_dir()
    assert accelerator.save_iteration == 1
    with pytest.raises(SettingError, match="ProjectConfiguration"):
        accelerator.project_configuration = str(tmp_path)  # type: ignore[assignment]


def test_every_attribute_can_be_asked_for_before_and_after_preparing() -> None:
    accelerator = Accelerator(cpu=True)
    # The drop-in, if it is imported, adds private names of the original, which explain why they are absent.
    names = [name for name in dir(accelerator) if not name.startswith("_")]
    absent = {name for name in names if not hasattr(accelerator, name)}
    assert absent == {
        "context_parallel_rank",
        "data_parallel_rank",
        "data_parallel_shard_rank",
        "deepspeed_config",
        "pipeline_parallel_rank",
        "sequence_parallel_rank",
        "tensor_parallel_rank",
    }
    accelerator.prepare(nn.Linear(1, 1))
    assert {name for name in names if not hasattr(accelerator, name)} == absent


def test_an_attribute_that_is_read_only_is_named_when_it_is_set() -> None:
    accelerator = Accelerator(cpu=True)
    for name in ("device", "num_processes", "mixed_precision", "is_main_process"):
        with pytest.raises(AttributeError, match=name):
            setattr(accelerator, name, None)
