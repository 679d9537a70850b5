"""DeepSpeed's names at their old addresses: whose they are, and what they do where DeepSpeed is not installed."""

from __future__ import annotations

import pytest
import torch

import accelerate.utils
import accelerate.utils.deepspeed as old
from accel_plugins.deepspeed import config, engine
from accel_state.errors import AccelError, Missing, SettingError
from accel_state.settings.installed import importable
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import GatheredParameters
from accelerate.utils.operations import GatheredParameters as FromOperations

pytestmark = pytest.mark.usefixtures("fresh_state")


HOMES = {
    "DeepSpeedEngineWrapper": engine,
    "DeepSpeedOptimizerWrapper": engine,
    "DeepSpeedSchedulerWrapper": engine,
    "DummyOptim": config,
    "DummyScheduler": config,
    "HfDeepSpeedConfig": config,
    "map_pytorch_optim_to_deepspeed": engine,
}


@pytest.mark.parametrize("name", HOMES)
def test_a_name_is_that_of_its_home(name: str) -> None:
    assert getattr(old, name) is getattr(HOMES[name], name)
    assert getattr(accelerate.utils, name) is getattr(HOMES[name], name)


def test_the_settings_are_those_of_the_backend() -> None:
    assert DeepSpeedPlugin is config.DeepSpeedPlugin
    assert accelerate.utils.DeepSpeedPlugin is config.DeepSpeedPlugin


def test_whole_parameters_are_gathered_already() -> None:
    assert FromOperations is GatheredParameters
    weight = torch.nn.Parameter(torch.ones(2))
    with GatheredParameters([weight], modifier_rank=0):
        weight.data.add_(1)
    with GatheredParameters(weight, enabled=False):
        assert weight.tolist() == [2.0, 2.0]


@pytest.mark.skipif(importable("deepspeed"), reason="DeepSpeed is installed")
def test_divided_parameters_need_deepspeed() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(Missing, match="pip install"), GatheredParameters(weight):
        pass


@pytest.mark.skipif(
    importable("transformers") and not importable("deepspeed"), reason="transformers asks for DeepSpeed"
)
def test_get_active_deepspeed_plugin() -> None:
    Accelerator(cpu=True)
    state = AcceleratorState()
    with pytest.raises(SettingError, match="does not use DeepSpeed"):
        old.get_active_deepspeed_plugin(state)
    first, second = DeepSpeedPlugin(zero_stage=1), DeepSpeedPlugin(zero_stage=2)
    state.deepspeed_plugin = {"first": first, "second": second}
    assert old.get_active_deepspeed_plugin(state) is first
    state.select_deepspeed_plugin("second")
    assert old.get_active_deepspeed_plugin(state) is second
    assert (first.selected, second.selected) == (False, True)
    with pytest.raises(AccelError, match="'third'"):
        state.select_deepspeed_plugin("third")


@pytest.mark.skipif(importable("deepspeed"), reason="DeepSpeed is installed")
def test_training_with_deepspeed_names_the_install_line() -> None:
    with pytest.raises(Missing, match=r"pip install .deepspeed"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
