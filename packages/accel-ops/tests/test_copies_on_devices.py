"""Copies with `non_blocking=True` are used at once, behind work that keeps the device busy."""

from __future__ import annotations

from typing import Any

import torch

from accel_ops import send_to_device
from accel_testing.plugin import on_devices

ELEMENTS = 2**20
ROUNDS = 6


def occupied(device: torch.device) -> torch.Tensor:
    """Something the device is busy with for a while, where calls return before their work is done."""
    side = 4096 if device.type == "cuda" else 64
    product = torch.full((side, side), 1.0 / side, device=device)
    for _ in range(4):
        product = product @ product
    return product


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def filled(number: int, device: torch.device) -> dict[str, Any]:
    return {
        "large": pinned(torch.full((ELEMENTS,), float(number)), device),
        "pair": (pinned(torch.arange(8) + number, device), "text"),
    }


@on_devices("cpu", "simulated", differs="the copy is queued behind a kernel when the call returns")
def test_a_copy_to_the_device_is_computed_with_at_once(device: torch.device) -> None:
    sums = []
    for number in range(ROUNDS):
        occupied(device)
        moved = send_to_device(filled(number, device), device, non_blocking=True)
        assert moved["large"].device == device
        assert moved["pair"][1] == "text"
        sums.append((moved["large"].double().sum() + moved["pair"][0].sum()).item())
    assert sums == [ELEMENTS * number + 28 + 8 * number for number in range(ROUNDS)]


@on_devices("cpu", "simulated", differs="the pinned source is freed while the copy from it still waits on the stream")
def test_the_source_of_a_copy_may_be_forgotten_at_once(device: torch.device) -> None:
    kept = []
    for number in range(ROUNDS):
        occupied(device)
        # The next source would get the memory of this one if its copy were not waited for.
        kept.append(send_to_device(filled(number, device), device, non_blocking=True)["large"])
    assert [tensor[::4096].double().mean().item() for tensor in kept] == [float(number) for number in range(ROUNDS)]


@on_devices("cpu", "simulated", differs="another stream has to wait for the copy, which an event on its stream tells")
def test_a_copy_is_used_by_another_stream_that_waits(device: torch.device) -> None:
    sums = []
    for number in range(ROUNDS):
        occupied(device)
        moved = send_to_device(filled(number, device), device, non_blocking=True)["large"]
        sums.append(_sum_elsewhere(moved, device))
    assert sums == [float(ELEMENTS * number) for number in range(ROUNDS)]


def _sum_elsewhere(tensor: torch.Tensor, device: torch.device) -> float:
    if device.type != "cuda":
        return tensor.double().sum().item()
    other = torch.cuda.Stream(device)
    other.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(other):
        total = tensor.double().sum()
    tensor.record_stream(other)
    other.synchronize()
    return total.item()


@on_devices(
    "cpu",
    "simulated",
    differs="the copy to the host is on its way until the device is waited for",
)
def test_a_copy_to_the_host_is_complete_once_the_device_was_waited_for(device: torch.device) -> None:
    for number in range(ROUNDS):
        there = occupied(device).sum() * 0 + torch.full((ELEMENTS,), float(number), device=device)
        back = send_to_device({"value": there}, "cpu", non_blocking=True)["value"]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        assert back.device.type == "cpu"
        assert back.eq(number).all()


@on_devices("cpu", "simulated", differs="a copy without non_blocking has ended, the host may change its source")
def test_the_source_of_a_blocking_copy_may_be_changed_at_once(device: torch.device) -> None:
    source = pinned(torch.ones(ELEMENTS), device)
    for number in range(ROUNDS):
        occupied(device)
        source.fill_(number)
        moved = send_to_device(source, device, non_blocking=False) + 0
        source.fill_(-1.0)
        assert moved.eq(number).all()
