"""What DeepSpeed is asked for and cannot do: no or another version of it, no folder, no values."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accel_plugins import resolve
from accel_plugins.deepspeed.config import DeepSpeedPlugin
from accel_state import PartialState, current
from accel_state.errors import Missing, SettingError
from accel_state.settings.installed import importable
from accel_testing.processes import run_command

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.mark.skipif(importable("deepspeed"), reason="DeepSpeed is installed")
@pytest.mark.parametrize("by_name", [True, False])
def test_without_deepspeed_the_install_line_is_told(by_name: bool) -> None:
    PartialState(cpu=True)
    name, config = ("deepspeed", None) if by_name else (None, DeepSpeedPlugin(zero_stage=1))
    with pytest.raises(Missing) as caught:
        resolve.choose(name, config, current.process())
    assert caught.value.obstacle == "The package 'deepspeed' is not installed."
    assert 'pip install "deepspeed>=0.18.2"' in caught.value.remedy


def test_an_older_deepspeed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    metadata = tmp_path / "deepspeed-0.14.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.14.0\n")
    # A new process, because this one remembers what it has found.
    demand = "from accel_plugins.deepspeed.manifest import MANIFEST; MANIFEST.requires[0].demand('It was to train.')"
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = run_command([sys.executable, "-c", demand], timeout=250, env={"PYTHONPATH": path})
    assert done.returncode != 0
    assert "deepspeed 0.14.0 is installed; >=0.18.2 is needed." in done.stderr
    assert 'Run: pip install "deepspeed>=0.18.2"' in done.stderr


def test_folders_on_disks_reach_deepspeed() -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/disk/states",
        offload_param_device="nvme",
        offload_param_nvme_path="/disk/weights",
    )
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/disk/states"}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/disk/weights"}
    table = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "auto"}}}
    assert (
        DeepSpeedPlugin(table, offload_param_nvme_path="/disk").get_value("zero_optimization.offload_param.nvme_path")
        == "/disk"
    )


def test_folders_on_disks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/disk/states")
    plugin = DeepSpeedPlugin()
    assert plugin.offload_optimizer_nvme_path == "/disk/states"
    assert plugin.get_value("zero_optimization.offload_optimizer.nvme_path") == "/disk/states"


@pytest.mark.parametrize("what", ["optimizer", "param"])
def test_a_disk_without_a_folder_is_refused(what: str) -> None:
    with pytest.raises(SettingError, match=f"offload_{what}_nvme_path"):
        DeepSpeedPlugin(zero_stage=3, **{f"offload_{what}_device": "nvme"})
    table = {"zero_optimization": {"stage": 3, f"offload_{what}": {"device": "nvme"}}}
    with pytest.raises(SettingError, match=f"offload_{what}_nvme_path"):
        DeepSpeedPlugin(table)
