"""Seeds and states of generators on a device: what is drawn repeats, and what is saved is restored."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from accel_ops import set_seed, synchronize_rng_states
from accel_ops.rng import restore, snapshot
from accel_state import PartialState, current
from accel_testing.plugin import on_devices, working_on
from accel_testing.processes import Processes


def drawn(device: torch.device) -> list[list[float]]:
    """What a device draws for noise, for dropout and for an order."""
    noise = torch.randn(64, device=device)
    dropped = torch.nn.functional.dropout(torch.ones(64, device=device))
    order = torch.randperm(64, device=device)
    return [noise.cpu().tolist(), dropped.cpu().tolist(), order.cpu().tolist()]


@on_devices("cpu", "simulated", differs="the device draws from generators of its own, one for each GPU")
def test_a_seed_repeats_what_the_device_draws(device: torch.device) -> None:
    PartialState()
    set_seed(7)
    first = drawn(device)
    assert drawn(device) != first
    set_seed(7)
    assert drawn(device) == first


@on_devices("cpu", "simulated", differs="the state is that of the device's Philox generator: a seed and an offset")
def test_a_saved_state_of_all_generators_repeats_what_the_device_draws(device: torch.device) -> None:
    PartialState()
    set_seed(3)
    drawn(device)
    file = io.BytesIO()
    torch.save(snapshot(), file)
    expected = drawn(device)
    drawn(device)
    file.seek(0)
    restore(torch.load(file, weights_only=False))
    assert drawn(device) == expected


@on_devices("cpu", differs="the state travels over NCCL from the memory of the device, or through the host")
def test_synchronized_generators_of_the_device_draw_the_same(device: torch.device, gpus: Processes) -> None:
    found = gpus.run(_drawn_together, device.type)
    assert all(one == found[0] for one in found)


def _drawn_together(kind: str) -> Any:
    with working_on(kind):
        device = PartialState().device
        set_seed(5, device_specific=True)
        family = current.process().family
        synchronize_rng_states(["torch" if family.spec.rng_key is None else family.name])
        return drawn(device)


@on_devices("cpu", "simulated", differs="a restored state is copied from the host to each GPU")
def test_a_seed_for_each_process_differs_from_that_of_others(device: torch.device) -> None:
    PartialState()
    set_seed(7)
    first = drawn(device)
    set_seed(8)
    assert drawn(device) != first


@on_devices("cpu", differs="deterministic algorithms need a workspace of cuBLAS that is set by a variable")
def test_deterministic_algorithms_repeat_bit_for_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    PartialState()
    set_seed(1, deterministic=True)
    try:
        model = torch.nn.Linear(64, 64).to(device)
        inputs = torch.randn(32, 64, device=device)
        found = []
        for _ in range(2):
            model.zero_grad()
            model(inputs).square().sum().backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.clone())
        assert torch.equal(*found)
    finally:
        torch.use_deterministic_algorithms(False)
