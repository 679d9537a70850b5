"""Each device family that can be used here keeps what `DeviceSuite` asks; the others know their facts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_state import PartialState
from accel_state.devices import select
from accel_state.devices.base import DeviceFamily
from accel_state.devices.cpu import CPU
from accel_state.devices.specs import SPECS
from accel_state.devices.torch_family import CUDA, MPS, NPU, unlisted_family
from accel_state.devices.xla import XLA
from accel_state.errors import NotOffered
from accel_state.labels import DistributedType, RNGType
from accel_testing.devices import DeviceSuite
from accel_testing.processes import Processes
from accel_testing.simulated_device import BACKEND, NAME, POSSIBLE, simulated_device

simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")

DEVICE_NAMES = ("xpu", "npu", "mlu", "musa", "sdaa", "hpu", "neuron")


class TestCPU(DeviceSuite):
    @pytest.fixture
    def two(self, processes: Callable[[int], Processes]) -> Processes:  # type: ignore[override]
        return processes(2)

    @pytest.fixture
    def family(self) -> DeviceFamily:
        return CPU()

    def test_memory_is_counted(self, family: DeviceFamily, device: torch.device) -> None:
        """What a process holds may become less at any time, as its libraries and the system give memory back."""
        pytest.importorskip("psutil")
        assert 0 <= family.free_memory() <= family.total_memory()
        before = family.used_memory()
        held = torch.ones(16 * 2**20)
        assert before + held.nbytes // 2 <= family.used_memory() <= family.total_memory()


@simulated
class TestSimulated(DeviceSuite):
    around = simulated_device

    @pytest.fixture
    def two(self, processes: Callable[[int], Processes]) -> Processes:  # type: ignore[override]
        return processes(2)

    @pytest.fixture
    def family(self) -> DeviceFamily:
        return unlisted_family(NAME)


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs the GPU of an Apple computer")
class TestMPS(DeviceSuite):
    @pytest.fixture
    def family(self) -> DeviceFamily:
        return MPS()


@pytest.mark.skipif(not XLA().present(), reason="needs torch_xla, and PJRT_DEVICE where there is no TPU")
class TestXLA(DeviceSuite):
    @pytest.fixture
    def family(self) -> DeviceFamily:
        return XLA()


def test_every_family_with_a_spec_is_found_by_its_name() -> None:
    for name, spec in SPECS.items():
        family = select.family_of(name)
        assert (family.name, family.spec) == (name, spec)


def test_every_kind_of_generator_has_its_family() -> None:
    of_devices = set(RNGType.list()) - {"torch", "generator"}
    assert of_devices <= {family.name for family in select.families() if family.spec.rng_key is not None}


def test_keys_of_generators_are_unique() -> None:
    keys = [family.spec.rng_key for family in select.families() if family.spec.rng_key is not None]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_a_vendor_that_is_not_installed_is_absent(name: str) -> None:
    if hasattr(torch, name) and getattr(torch, name).is_available():
        pytest.skip("there is one here")
    assert select.family_of(name).present() is False


class VendorModule:
    """What a vendor's package adds to torch, as far as presence and memory need it."""

    def __init__(self) -> None:
        self.seen: dict[str, str | None] = {}
        self.cleared = 0

    def is_available(self) -> bool:
        self.seen = {name: os.environ.get(name) for name in SPECS["mlu"].probing}
        return True

    def device_count(self) -> int:
        return 2

    def empty_cache(self) -> None:
        self.cleared += 1

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 3 + device.index, 10


@pytest.fixture
def mlu(monkeypatch: pytest.MonkeyPatch) -> VendorModule:
    module = VendorModule()
    monkeypatch.setitem(sys.modules, "torch_mlu", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "mlu", module, raising=False)
    monkeypatch.setattr("accel_state.devices.base._vendor_loaded", lambda vendor, name: vendor in sys.modules)
    return module


def test_a_vendor_s_device_is_probed_without_being_opened(mlu: VendorModule) -> None:
    before = dict(os.environ)
    assert select.best_family().name == "mlu"
    assert mlu.seen == {"PYTORCH_CNDEV_BASED_MLU_CHECK": "1"}
    assert dict(os.environ) == before


def test_an_installed_vendor_without_its_device_is_absent(mlu: VendorModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlu, "is_available", lambda: False)
    assert not select.family_of("mlu").present()
    monkeypatch.delattr(torch, "mlu")
    assert not select.family_of("mlu").present()


def test_a_vendor_s_family_calls_the_vendor_s_module(mlu: VendorModule, monkeypatch: pytest.MonkeyPatch) -> None:
    family = select.family_of("mlu")
    monkeypatch.setattr(type(family), "module", mlu)
    family.empty_cache()
    assert mlu.cleared == 1
    assert (family.count(), family.spec.backend, family.spec.label) == (2, "cncl", DistributedType.MULTI_MLU)
    with pytest.raises(NotOffered, match="max_memory_allocated"):
        family.peak_memory()


def test_a_broken_vendor_module_warns_and_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken_vendor_library.py").write_text("raise OSError('libbroken.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    family = NPU()
    family.spec = SPECS["npu"]._replace(vendor="broken_vendor_library")
    with pytest.warns(UserWarning, match=r"broken_vendor_library is installed.*libbroken\.so"):
        assert not family.present()
    assert not family.present()


def test_a_device_without_collectives_refuses_several_processes() -> None:
    with pytest.raises(NotOffered, match="--cpu"):
        MPS().distributed_backend()


def test_errors_of_each_family_that_mean_too_little_memory() -> None:
    assert CUDA().out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert CUDA().out_of_memory(torch.OutOfMemoryError("any"))
    assert CUDA().out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Is it contiguous?"))
    assert CPU().out_of_memory(MemoryError())
    assert CPU().out_of_memory(RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory"))
    assert select.family_of("npu").out_of_memory(RuntimeError("NPU out of memory."))


@pytest.mark.parametrize(
    "text", ["CPU out of memory.", "MPS backend out of memory (allocated 9 GB)", "CUDA error: out of memory"]
)
def test_every_family_recognises_out_of_memory_errors_of_others(text: str) -> None:
    for family in select.families():
        assert family.out_of_memory(RuntimeError(text))
        assert not family.out_of_memory(ValueError(text))


@simulated
@pytest.mark.usefixtures("fresh_state")
def test_the_simulated_device_is_used_only_inside_its_block() -> None:
    with simulated_device():
        state = PartialState()
        assert state.device == torch.device(NAME, 0)
        assert state.default_device == torch.device(NAME)
        assert state.distributed_type is DistributedType.NO
        state._reset_state()
        assert PartialState(cpu=True).device == torch.device("cpu")
    assert not select.family_of(NAME).present()


@simulated
def test_the_simulated_device_runs_out_of_memory() -> None:
    family = unlisted_family(NAME)
    with simulated_device(memory=4096):
        held = torch.ones(512, device=NAME)
        assert family.used_memory() == 2048
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.ones(1024, device=NAME)
        assert family.out_of_memory(caught.value)
        del held
        assert family.used_memory() == 0


@simulated
def test_the_simulated_device_refuses_tensors_of_the_cpu() -> None:
    with simulated_device():
        with pytest.raises(RuntimeError, match="cpu and simulated:0"):
            torch.ones(2, device=NAME) + torch.ones(2)
        assert (torch.ones(2, device=NAME) * torch.tensor(2.0)).tolist() == [2.0, 2.0]


def train_with_ddp() -> tuple[str, str, list[float]]:
    with simulated_device():
        state = PartialState()
        model = torch.nn.Linear(2, 1, bias=False).to(state.device)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        parallel(torch.full((1, 2), 1.0 + state.process_index, device=state.device)).sum().backward()
        grad = model.weight.grad
        assert grad is not None
        state.wait_for_everyone()
        answer = state.distributed_type.value, str(state.backend), grad.cpu().flatten().tolist()
        state.destroy_process_group()
        return answer


@simulated
def test_gradients_are_averaged_on_a_device_without_code_of_ours(two: Processes) -> None:
    assert two.run(train_with_ddp) == [("MULTI_GPU", BACKEND, [1.5, 1.5])] * 2
