"""Integers of numpy where an argument is an int, and limits of zero."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accel_bigmodel import get_max_memory, infer_auto_device_map
from accel_plugins import TorchTensorParallelPlugin
from accel_plugins.checkpoint.save_policy import ContinuousSavePolicy
from accel_plugins.deepspeed.config import DeepSpeedPlugin
from accel_state.errors import SettingError
from accel_torch import Accelerator, GradientAccumulationPlugin, ProjectConfiguration
from accel_torch.local_sgd import LocalSGD

pytestmark = pytest.mark.usefixtures("fresh_state")

TWO = np.int64(2)


@pytest.mark.parametrize("two", [TWO, np.uint8(2), np.int32(2), torch.tensor(2)])
def test_steps_of_accumulation(two: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=two)
    assert type(accelerator.gradient_accumulation_steps) is int
    assert accelerator.gradient_accumulation_steps == 2
    accelerator.gradient_accumulation_steps = np.int64(3)
    assert accelerator.gradient_accumulation_steps == 3
    assert GradientAccumulationPlugin(num_steps=two).num_steps == 2


@pytest.mark.parametrize("wrong", [np.int64(0), np.float64(2.0), np.bool_(True), True, 2.0, "2"])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(SettingError, match="must be an int of at least 1"):
        GradientAccumulationPlugin(num_steps=wrong)


SETTINGS: dict[str, Callable[[], Any]] = {
    "check_replicas_every": lambda: Accelerator(cpu=True, check_replicas_every=TWO) and 2,
    "local_sgd_steps": lambda: LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), TWO).local_sgd_steps,
    "tp_size": lambda: TorchTensorParallelPlugin(tp_size=TWO).tp_size,
    "keep_last": lambda: ContinuousSavePolicy(keep_last=TWO).keep_last,
    "zero_stage": lambda: DeepSpeedPlugin(zero_stage=TWO).deepspeed_config["zero_optimization"]["stage"],
    "total_limit": lambda: ProjectConfiguration("x", total_limit=TWO).total_limit,
    "iteration": lambda: ProjectConfiguration("x", iteration=TWO).iteration,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    assert SETTINGS[name]() == 2


def test_budgets_of_memory() -> None:
    assert get_max_memory({"cpu": np.int64(1000)}) == {"cpu": 1000}
    assert infer_auto_device_map(nn.Linear(1, 1), {"cpu": np.int64(10_000)}) == {"": "cpu"}


@pytest.mark.parametrize(("limit", "kept"), [(0, 1), (np.int64(0), 1), (1, 1), (TWO, 2), (None, 3)])
def test_number_of_checkpoints_kept(tmp_path: Path, limit: Any, kept: int) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    for _ in range(3):
        accelerator.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"checkpoint_{number}" for number in range(3 - kept, 3)]


@pytest.mark.parametrize("wrong", [-1, 1.5, "2"])
def test_other_limits_are_refused(wrong: Any) -> None:
    with pytest.raises(SettingError, match="total_limit"):
        ProjectConfiguration("x", total_limit=wrong)
