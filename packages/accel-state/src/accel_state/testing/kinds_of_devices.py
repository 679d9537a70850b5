"""Tests whose one body runs on a GPU, and on the CPU or the simulated device where there is no GPU.

    @on_devices("cpu", "simulated", differs="kernels run on a stream, after their call has returned")
    def test_sums(device):
        assert torch.ones(3, device=device).sum().item() == 3

What other processes call works on the kind of device of the test inside `working_on(device.type)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch

from accel_state.devices.select import family_of
from accel_state.settings.environ import publish

__all__ = ("GPU_PROCESSES", "SIMULATED", "on_devices", "room_for", "working_on")

SIMULATED: Final = "simulated"
"""The kind of device that is made of CPU memory, see `accel_state.testing.simulated_device`."""

GPU_PROCESSES: Final = int(os.environ.get("GPU_PROCESSES", "1"))
"""How many processes tests start that give each process a GPU of its own."""


def on_devices(*others: str, differs: str, gpus: int = 1) -> Any:
    """Decorator: run a test on a CUDA device, and on others; it takes the device from the fixture `device`.

    Args:
        others: "cpu" and "simulated", where the body shows something there.
        differs: in one line, what is different on a GPU.
        gpus: how many GPUs the test needs.
    """
    if SIMULATED in others:
        # It has to be known to torch before the first backward pass of this process.
        import accel_state.testing.simulated_device  # noqa: F401
    cuda = pytest.param("cuda", marks=pytest.mark.cuda(differs=differs, gpus=gpus))
    return pytest.mark.parametrize("device", [*others, cuda], indirect=True)


@contextmanager
def working_on(kind: str, memory: int = 2**30) -> Iterator[None]:
    """Let a process state that is made inside the block choose this kind of device.

    Args:
        kind: "cpu", "simulated" or "cuda".
        memory: bytes that the simulated device has.
    """
    if kind == SIMULATED:
        from accel_state.testing.simulated_device import simulated_device

        with simulated_device(memory=memory):
            yield
        return
    if kind == "cpu":
        publish({"ACCELERATE_USE_CPU": "true"})
    yield


@contextmanager
def room_for(device: torch.device, size: int) -> Iterator[None]:
    """Leave `size` bytes of a device's memory to this process, until the block ends."""
    if device.type != "cuda":
        held = torch.empty(family_of(device).free_memory() - size, dtype=torch.uint8, device=device)
        yield
        del held
        return
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + size) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
