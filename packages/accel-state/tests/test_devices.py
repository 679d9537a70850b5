"""Device families: found, asked, and a broken one told of."""

from __future__ import annotations

import pytest
import torch

from accel_state.devices import select
from accel_state.devices.cpu import CPU
from accel_state.errors import NotOffered, PluginError
from accel_state.settings.extension import Extension


def test_the_cpu_is_always_there() -> None:
    cpu = select.family_of("cpu")
    assert isinstance(cpu, CPU)
    assert cpu.present()
    assert cpu.device(3) == torch.device("cpu")
    assert cpu.supports(torch.bfloat16)
    assert not cpu.supports(torch.float64)
    assert select.family_of(torch.device("cpu")) is cpu
    assert min(select.families(), key=lambda family: family.priority) is cpu


def test_generators_of_the_cpu_are_torch_s() -> None:
    cpu = CPU()
    before = cpu.current_rng_state()
    drawn = torch.rand(3)
    cpu.set_current_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)


def test_an_unknown_family() -> None:
    with pytest.raises(NotOffered, match="Known device families: cpu, cuda"):
        select.family_of("abacus:0")


def test_a_broken_family_is_kept_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Extension("accel.devices", "abacus", "no_such_module:Abacus", "abacus 1.0")
    monkeypatch.setattr(select, "extensions", lambda group: (broken,))
    select._load.cache_clear()
    try:
        with pytest.warns(UserWarning, match="abacus"):
            assert select.best_family().present()
        with pytest.raises(PluginError, match=r"abacus 1\.0"):
            select.family_of("abacus")
    finally:
        select._load.cache_clear()
