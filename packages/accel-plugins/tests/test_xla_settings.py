"""What the XLA backend declares and how it is configured, without torch_xla."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from accel_plugins import Capabilities, resolve
from accel_plugins.xla.config import XLAPlugin
from accel_plugins.xla.manifest import MANIFEST, present
from accel_state import current
from accel_state.errors import Missing, SettingError
from accel_state.process import PartialState
from accel_state.settings.environ import publish
from accel_state.settings.installed import importable
from accel_testing.processes import run_command

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_manifest_and_settings_load_without_torch() -> None:
    code = "import accel_plugins.xla.config, accel_plugins.xla.manifest, sys; print('torch' in sys.modules)"
    assert run_command([sys.executable, "-c", code]).stdout.strip() == "False"


def test_xla_plugin_is_filled_from_the_environment() -> None:
    assert (XLAPlugin().fsdp, XLAPlugin().downcast_bf16) == (False, False)
    publish({"ACCEL_XLA_FSDP": "true", "ACCELERATE_DOWNCAST_BF16": "1"})
    assert (XLAPlugin().fsdp, XLAPlugin().downcast_bf16) == (True, True)
    assert (XLAPlugin(fsdp=False).fsdp, XLAPlugin(downcast_bf16=False).downcast_bf16) == (False, False)


@pytest.mark.parametrize("wrong", [{"prefetch": -1}, {"prefetch": 2.5}, {"blocks": "Block"}, {"blocks": (1,)}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))) as caught:
        XLAPlugin(**wrong)
    assert caught.value.remedy


def test_a_process_on_the_cpu_is_none_of_its_own() -> None:
    PartialState(cpu=True)
    assert present(current.process()) is False


@pytest.mark.skipif(importable("torch_xla"), reason="torch_xla is here")
def test_without_torch_xla_it_says_what_to_install() -> None:
    PartialState(cpu=True)
    with pytest.raises(Missing, match="pip install"):
        resolve.choose(config=XLAPlugin(), process=current.process())


def test_it_declares_what_it_lacks() -> None:
    assert MANIFEST.tier == 3
    assert MANIFEST.capabilities == Capabilities(fp16=False, join=False, local_passes=False, unused_parameters=False)
