"""The device that is taken, what its driver tells, and versions of libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from accel_state.devices import nvidia, select
from accel_state.devices.cuda import CUDA, check_cuda_fp8_capability
from accel_state.devices.select import get_current_device_type
from accel_state.errors import Missing, NotOffered, SettingError
from accel_state.settings import versions
from accel_state.settings.versions import compare_versions, installed_version
from accel_state.testing.simulated_device import NAME, POSSIBLE, simulated_device
from accel_state.topology import Topology

simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")


@pytest.fixture(autouse=True)
def no_cached_versions(fresh_state: None) -> Iterator[None]:
    yield
    installed_version.cache_clear()


@simulated
def test_get_current_device_type() -> None:
    expected = select.best_family()
    assert get_current_device_type() == (expected.name, expected.label.value)
    with simulated_device():
        assert get_current_device_type() == (NAME, "MULTI_GPU")


def test_versions_of_libraries() -> None:
    here = importlib.metadata.version("torch")
    assert compare_versions("torch", ">=", "2.9")
    assert compare_versions(Version("1.5"), "<", "2")
    assert versions.torch_version == Version(here)
    with pytest.raises(Missing, match="pip install no-such-library"):
        compare_versions("no-such-library", ">=", "1")
    with pytest.raises(SettingError, match="=>"):
        compare_versions("torch", "=>", "1")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = versions.no_such_name


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int, driver: str) -> None:
    """Put a program on the path that answers as the driver's does."""
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in *name*) line="{name}";; *driver*) line="{driver}";; esac\n'
        f'for _ in $(seq {count}); do echo "$line"; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the driver's program is a shell script")
@pytest.mark.parametrize(
    ("name", "count", "driver", "direct"),
    [
        ("NVIDIA GeForce RTX 4090", 2, "535.104.05", False),
        ("NVIDIA GeForce RTX 4090", 2, "550.40.07", True),
        ("NVIDIA GeForce RTX 4090", 1, "535.104.05", True),
        ("NVIDIA A100-SXM4-80GB", 8, "535.104.05", True),
    ],
)
def test_gpu_info_and_driver_version_of_nvidia_smi(
    name: str, count: int, driver: str, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, name, count, driver)
    assert nvidia.get_gpu_info() == ([name] * count, count)
    assert nvidia.get_driver_version() == driver
    assert nvidia.check_cuda_p2p_ib_support() is direct


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the driver's program is a shell script")
def test_several_processes_on_gpus_that_cannot_reach_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, "NVIDIA GeForce RTX 4090", 2, "535.104.05")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    two = Topology(rank=0, world_size=2, local_world_size=2)
    CUDA().settle(Topology())
    with pytest.raises(NotOffered, match="NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1"):
        CUDA().settle(two)
    for variable in nvidia.WITHOUT_P2P:
        monkeypatch.setenv(variable, "1")
    CUDA().settle(two)


def test_a_machine_without_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia.get_gpu_info() == ([], 0)
    assert nvidia.check_cuda_p2p_ib_support()
    with pytest.raises(NotOffered, match="Install the driver"):
        nvidia.get_driver_version()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_computes_with_8_bits() -> None:
    assert check_cuda_fp8_capability() is False
