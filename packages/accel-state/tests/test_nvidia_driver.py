"""What NVIDIA's driver reports, and GPUs that cannot access each other's memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from accel_state.devices import torch_family
from accel_state.devices.cpu import CPU
from accel_state.devices.torch_family import CUDA
from accel_state.errors import NotOffered
from accel_state.topology import Topology


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
    assert torch_family.get_gpu_info() == ([name] * count, count)
    assert torch_family.get_driver_version() == driver
    assert torch_family.check_cuda_p2p_ib_support() is direct


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the driver's program is a shell script")
def test_several_processes_on_gpus_that_cannot_reach_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, "NVIDIA GeForce RTX 4090", 2, "535.104.05")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    two = Topology(rank=0, world_size=2, local_world_size=2)
    CUDA().configure(Topology())
    with pytest.raises(NotOffered, match="NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1"):
        CUDA().configure(two)
    for variable in torch_family.WITHOUT_P2P:
        monkeypatch.setenv(variable, "1")
    CUDA().configure(two)


def test_a_machine_without_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert torch_family.get_gpu_info() == ([], 0)
    assert torch_family.check_cuda_p2p_ib_support()
    with pytest.raises(NotOffered, match="Install the driver"):
        torch_family.get_driver_version()


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the driver's program is a shell script")
def test_a_gpu_is_described_and_so_is_what_drives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {
        "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(total_memory=150109880320),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, create_autospec(getattr(torch.cuda, name), return_value=answer))
    version = create_autospec(torch.cuda.nccl.version, return_value=(2, 28, 9))
    monkeypatch.setattr(torch.cuda.nccl, "version", version)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    smi(tmp_path, monkeypatch, "NVIDIA H200", 1, "580.159.04")

    assert CUDA().description(0) == "NVIDIA H200, 139.8 GiB, capability 9.0"
    assert CUDA().software() == {"CUDA": "13.0", "driver": "580.159.04", "NCCL": "2.28.9"}
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert CUDA().software() == {"CUDA": "13.0"}
    assert CPU().description(0) == ""
