"""Which devices only one process can use, so that a run warns before two have the same one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.cpu import CPU
from accel_state.devices.torch_family import CUDA, MPS, NPU, XPU

FIRST = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backend", "identity"),
    [
        ("nccl", "cuda device GPU-5e"),
        ("NCCL", "cuda device GPU-5e"),
        ("cpu:gloo,cuda:nccl", "cuda device GPU-5e"),
        ("gloo", None),
        ("cpu:gloo,cuda:gloo", None),
        ("mpi", None),
    ],
)
def test_nccl_gives_a_gpu_to_one_process(monkeypatch: pytest.MonkeyPatch, backend: str, identity: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-5e"))
    assert CUDA().exclusive_device(FIRST, backend) == identity


def test_a_gpu_without_an_identity_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert CUDA().exclusive_device(FIRST, "nccl") is None


@pytest.mark.parametrize("family", [CPU(), XPU(), NPU(), MPS()], ids=lambda family: family.name)
def test_other_devices_are_not_asked(family: DeviceFamily) -> None:
    assert family.exclusive_device(torch.device("cpu"), "gloo") is None
