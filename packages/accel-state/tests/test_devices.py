"""Device families: found, asked, and a broken one told of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import PartialState
from accel_state.choices import ComputeEnvironment
from accel_state.devices import select
from accel_state.devices.cpu import CPU
from accel_state.devices.specs import SPECS
from accel_state.errors import PluginError, SettingError
from accel_state.labels import DistributedType, PrecisionType
from accel_state.settings.run import ProcessSettings
from accel_testing.fresh import fresh


def test_cpu_family_is_present_and_has_the_lowest_priority() -> None:
    cpu = select.family_of("cpu")
    assert isinstance(cpu, CPU)
    assert cpu.present()
    assert cpu.device(3) == torch.device("cpu")
    assert cpu.supports(torch.bfloat16)
    assert not cpu.supports(torch.float64)
    assert select.family_of(torch.device("cpu")) is cpu
    assert min(select.families(), key=lambda family: family.spec.priority) is cpu


def test_cpu_family_uses_the_generator_of_torch() -> None:
    cpu = CPU()
    before = cpu.current_rng_state()
    drawn = torch.rand(3)
    cpu.set_current_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)


def test_an_unknown_device_family_is_refused() -> None:
    with pytest.raises(SettingError, match=r"(?s)the device abacus:0.*device families: cpu, cuda"):
        select.family_of("abacus:0")


Offer = Callable[..., None]

OWN = """
from accel_state.devices.cpu import CPU
from accel_state.devices.specs import SPECS
class Family(CPU):
    spec = SPECS["cpu"]._replace(name={name!r})
"""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Install a distribution with a device family."""

    def install(name: str, distribution: str, source: str = OWN) -> None:
        folder = tmp_path / distribution
        info = folder / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text(f"[accel.devices]\n{name} = {distribution}:Family\n")
        (folder / f"{distribution}.py").write_text(source.format(name=name))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, distribution, raising=False)
        select._load.cache_clear()

    select._load.cache_clear()
    yield install
    select._load.cache_clear()


def test_a_family_that_cannot_be_loaded_is_recorded_with_its_error(offer: Offer) -> None:
    offer("abacus", "broken_abacus", "import no_such_module")
    with pytest.warns(UserWarning, match="'abacus' is ignored.*no_such_module"):
        assert select.best_family().present()
    with pytest.raises(PluginError, match=r"broken-abacus 1\.0"):
        select.family_of("abacus")


def test_a_family_of_another_package_replaces_a_built_in_one(offer: Offer) -> None:
    offer("npu", "better_npu")
    assert type(select.family_of("npu:0")).__module__ == "better_npu"
    assert [family.name for family in select.families()].count("npu") == 1


def test_two_packages_with_one_family_name_are_both_named(offer: Offer) -> None:
    offer("abacus", "first_abacus")
    offer("abacus", "second_abacus")
    assert {failed.name for failed in select.failed_families()} == {"abacus"}
    with pytest.raises(PluginError, match=r"second-abacus 1\.0, first-abacus 1\.0"):
        select.family_of("abacus")


def test_a_family_is_added_at_run_time(offer: Offer) -> None:
    class Abacus(CPU):
        spec = SPECS["cpu"]._replace(name="abacus", priority=1000)

    select.register_family(Abacus())
    assert isinstance(select.best_family(), Abacus)
    assert isinstance(select.wanted_family(ProcessSettings(cpu=True)), CPU)
    assert isinstance(select.wanted_family(ProcessSettings(device="abacus:0")), Abacus)


@pytest.mark.parametrize("index", [1, 64])
def test_the_device_setting_selects_the_device_with_its_index(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with fresh():
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"cuda:{index}")
        assert PartialState().device == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


@pytest.mark.parametrize(("given", "index"), [("cpu:64", 64), ("cpu:0", 0), ("cpu", None)])
def test_a_cpu_keeps_the_index_that_the_setting_gives_it(
    monkeypatch: pytest.MonkeyPatch, given: str, index: int | None
) -> None:
    with fresh():
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", given)
        device = PartialState().device
        assert (device.type, device.index) == ("cpu", index)
        assert torch.ones(1).to(device).device == torch.device("cpu")


def test_a_device_index_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with fresh():
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:64")
        with pytest.raises(SettingError, match=r"(?s)'cuda:64'.*invalid device ordinal.*of one of the"):
            PartialState()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (DistributedType.MULTI_CPU, "DistributedType.MULTI_CPU"),
        (ComputeEnvironment.LOCAL_MACHINE, "ComputeEnvironment.LOCAL_MACHINE"),
        (PrecisionType.BF16, "bf16"),
    ],
)
def test_enum_members_are_formatted_as_scripts_compare_them(kind: Any, text: str) -> None:
    assert str(kind) == text
    assert kind.value in type(kind)
    assert kind == kind.value


def test_an_invalid_device_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh():
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:zero")
        with pytest.raises(SettingError, match="'cpu:zero'"):
            PartialState()
