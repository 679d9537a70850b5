"""Weights in memory or on disk that visit a device: in time, in order with its streams, and within its memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    prefetch,
    save_weights,
    set_module_tensor_to_device,
)
from accel_state.devices.select import family_of
from accel_testing.plugin import on_devices, room_for


@pytest.fixture(autouse=True)
def end_threads() -> Iterator[None]:
    yield
    # A thread that still reads ahead would do so on the device of the next test.
    prefetch.end_threads()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def width_for(device: torch.device) -> int:
    """Blocks of a GPU are larger than what its allocator rounds up to."""
    return 2048 if device.type == "cuda" else 128


def block_bytes(width: int) -> int:
    return 2 * 4 * (width * width + width)


def model_and_output(device: torch.device, blocks: int = 12) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    width = width_for(device)
    model = nn.Sequential(*(Block(width) for _ in range(blocks))).eval()
    x = torch.randn(4, width)
    with torch.no_grad():
        return model, x, model(x)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.cpu(), expected, rtol=1e-3, atol=1e-2)


def warm_up(device: torch.device) -> None:
    """Let libraries of the device take what they keep."""
    width = width_for(device)
    with torch.no_grad():
        nn.functional.linear(torch.ones(4, width, device=device), torch.ones(width, width, device=device)).sum().item()
    family_of(device).synchronize()
    family_of(device).empty_cache()


def delay(device: torch.device) -> None:
    """Keep the device busy, so that what follows is queued."""
    side = 4096 if device.type == "cuda" else 64
    product = torch.full((side, side), 1.0 / side, device=device)
    for _ in range(4):
        product = product @ product


@pytest.mark.parametrize("ahead", [None, 0])
@pytest.mark.parametrize("where", ["memory", "disk"])
@on_devices("simulated", differs="copies run from pinned memory on a stream of their own while blocks compute")
def test_weights_arrive_in_time_and_leave_again(
    device: torch.device, tmp_path: Path, ahead: int | None, where: str
) -> None:
    model, x, expected = model_and_output(device)
    if where == "disk":
        disk_offload(model, tmp_path, device, max_prefetch_bytes=ahead)
    else:
        cpu_offload(model, device, max_prefetch_bytes=ahead)
    warm_up(device)
    family = family_of(device)
    family.reset_peak_memory()
    before = family.used_memory()
    with torch.no_grad():
        for _ in range(10):
            delay(device)
            assert close(model(x), expected)
    family.synchronize()
    busy = 4 * 4096**2 * 2 if device.type == "cuda" else 2**17
    assert family.peak_memory() - before < 4 * block_bytes(width_for(device)) + busy + 2**24 * (device.type == "cuda")


@on_devices("simulated", differs="copies of blocks read ahead may be under way when a pass ends, or fails")
def test_no_block_stays_on_the_device_between_passes(device: torch.device) -> None:
    model, x, expected = model_and_output(device)
    cpu_offload(model, device)
    warm_up(device)
    before = family_of(device).used_memory()
    with torch.no_grad():
        for _ in range(4):
            # As in generation, each pass begins after the one before has returned.
            assert close(model(x), expected)
            family_of(device).synchronize()
            assert family_of(device).used_memory() == before


@on_devices("simulated", differs="each stream of the allocator keeps memory of its own, so that many streams keep much")
def test_what_is_kept_for_reading_ahead_does_not_grow_with_passes(device: torch.device) -> None:
    model, x, expected = model_and_output(device)
    cpu_offload(model, device)
    warm_up(device)
    kept = []
    with torch.no_grad():
        for _ in range(8):
            assert close(model(x), expected)
            family_of(device).synchronize()
            held = torch.cuda.memory_reserved(device) if device.type == "cuda" else family_of(device).used_memory()
            kept.append(held)
    assert kept[-1] <= kept[3] + block_bytes(width_for(device))


@pytest.mark.parametrize("blocks", [1.5, 2.5])
@on_devices("simulated", differs="the allocator is out of memory while the thread that reads ahead asks for more")
def test_without_room_for_reading_ahead_everything_is_still_computed(
    device: torch.device, blocks: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, expected = model_and_output(device)
    # As much as wanted: the memory of the device is the limit.
    cpu_offload(model, device, max_prefetch_bytes=2**40)
    warm_up(device)
    spare = 2**23 if device.type == "cuda" else 2**14
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        with room_for(device, int(blocks * block_bytes(width_for(device))) + spare):
            for _ in range(4):
                assert close(model(x), expected)
        for _ in range(2):
            assert close(model(x), expected)


@on_devices("simulated", differs="the driver counts what is free, and blocks are rounded up by the allocator")
def test_a_map_over_device_memory_and_disk(device: torch.device, tmp_path: Path) -> None:
    model, x, expected = model_and_output(device)
    block = block_bytes(width_for(device))
    device_map = infer_auto_device_map(model, {0: 5 * block, "cpu": 4 * block}, ["Block"])
    assert {0, "cpu", "disk"} == set(device_map.values())
    dispatch_model(model, device_map, offload_dir=tmp_path)
    with torch.no_grad():
        for _ in range(3):
            found = model(x.to(device))
            assert found.device == device
            assert close(found, expected)


@on_devices("simulated", differs="the device converts, and computes bfloat16 by other kernels than the CPU")
def test_a_checkpoint_in_another_dtype_is_loaded_to_the_device(device: torch.device, tmp_path: Path) -> None:
    model, x, expected = model_and_output(device, 4)
    save_weights(model.state_dict(), tmp_path, "10MB")
    with init_empty_weights():
        empty = nn.Sequential(*(Block(width_for(device)) for _ in range(4))).eval()
    loaded: Any = load_checkpoint_and_dispatch(empty, tmp_path, {"": 0}, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert {p.device for p in loaded.parameters()} == {device}
    with torch.no_grad():
        found = loaded(x.to(device, torch.bfloat16)).float().cpu()
    assert (found - expected).norm() / expected.norm() < 0.05


@on_devices("simulated", differs="weights in double precision are copied as they are")
def test_a_model_in_float64_is_offloaded(device: torch.device) -> None:
    model, x, _ = model_and_output(device, 2)
    model.double()
    with torch.no_grad():
        expected = model(x.double())
        cpu_offload(model, device)
        for _ in range(3):
            assert torch.allclose(model(x.double()).cpu(), expected)


@on_devices("cpu", "simulated", differs="the copy from pinned memory has not begun when the call returns")
def test_a_tensor_that_is_set_without_blocking_is_used_at_once(device: torch.device) -> None:
    layer = nn.Linear(1024, 1024, bias=False)
    for number in range(4):
        delay(device)
        value = torch.full((1024, 1024), float(number))
        value = value.pin_memory() if device.type == "cuda" else value
        set_module_tensor_to_device(layer, "weight", device, value, non_blocking=True)
        del value
        with torch.no_grad():
            assert layer(torch.ones(1, 1024, device=device)).eq(1024.0 * number).all()


@on_devices("simulated", differs="another stream computes, and memory must not be given away before it has")
def test_blocks_compute_on_the_stream_of_the_caller(device: torch.device) -> None:
    model, x, expected = model_and_output(device)
    cpu_offload(model, device)
    with torch.no_grad():
        for _ in range(4):
            if device.type != "cuda":
                assert close(model(x), expected)
                continue
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                delay(device)
                found = model(x.to(device))
            stream.synchronize()
            assert close(found, expected)
