"""The tests that every device family must pass; a package that provides a family inherits them.

    class TestAbacus(DeviceSuite):
        @pytest.fixture
        def family(self):
            return Abacus()

Tests of generators, memory statistics and collectives are skipped if the family does not have its own.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
import torch

from accel_state import current
from accel_state.devices.base import DeviceFamily
from accel_state.devices.select import families, family_of
from accel_state.errors import NotOffered
from accel_state.process import PartialState
from accel_testing.processes import Processes

__all__ = ("DeviceSuite",)


def _gather_ranks(around: Callable[[], AbstractContextManager[None]]) -> tuple[str, list[float]]:
    """Called by each process: return the type of its device, and the ranks that it gathered there."""
    with around():
        state = PartialState()
        transport = current.process().transport
        output = torch.zeros(transport.world_size, device=transport.device)
        transport.all_gather(output, torch.full((1,), float(transport.rank), device=transport.device)).wait()
        kind, gathered = state.device.type, output.cpu().tolist()
        state.destroy_process_group()
        return kind, gathered


class DeviceSuite:
    """Tests of one device family; the machine must have such a device.

    Attributes:
        around: returns a context manager inside which the device is present. It must be importable, because other
            processes call it too.
    """

    around: ClassVar[Callable[[], AbstractContextManager[None]]] = contextlib.nullcontext

    @pytest.fixture
    def family(self) -> DeviceFamily:
        """The family under test; a subclass returns its own."""
        raise NotImplementedError("return the family under test from a fixture `family`")

    @pytest.fixture
    def two(self) -> Iterator[Processes]:
        """Two processes; a subclass may return a group that it uses for other tests too."""
        with Processes(2) as group:
            yield group

    @pytest.fixture(autouse=True)
    def _there(self, family: DeviceFamily) -> Any:
        with type(self).around():
            yield

    @pytest.fixture
    def device(self, family: DeviceFamily) -> torch.device:
        """The device of the first process."""
        return family.device(0)

    def test_it_is_found_by_its_name(self, family: DeviceFamily) -> None:
        assert type(family_of(family.name)) is type(family)
        assert any(other.name == family.name for other in families())

    def test_present_does_not_change_the_environment(self, family: DeviceFamily) -> None:
        before = dict(os.environ)
        assert family.present() is True
        assert dict(os.environ) == before
        assert family.count() >= 1

    def test_every_local_rank_has_a_device(self, family: DeviceFamily) -> None:
        devices = [family.device(local_rank) for local_rank in range(family.count() + 1)]
        assert {device.type for device in devices} == {family.name}
        assert devices[-1] == devices[0]
        assert family.device(0) == devices[0]

    def test_copies_to_the_device_and_back_are_exact(self, device: torch.device) -> None:
        numbers = torch.arange(6.0).view(2, 3)
        there = numbers.to(device)
        assert there.device.type == device.type
        assert torch.equal(there.cpu(), numbers)

    def test_gradients_are_those_of_the_cpu(self, device: torch.device) -> None:
        model, inputs = torch.nn.Linear(3, 2), torch.randn(4, 3)
        model(inputs).square().sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        model = model.to(device)
        model(inputs.to(device)).square().sum().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.cpu(), grad, rtol=1e-3, atol=1e-3)

    def test_a_seed_repeats_random_numbers(self, family: DeviceFamily, device: torch.device) -> None:
        torch.manual_seed(5)
        family.seed(5)
        first = torch.rand(4, device=device).cpu()
        torch.manual_seed(5)
        family.seed(5)
        assert torch.equal(torch.rand(4, device=device).cpu(), first)

    def test_generators_are_restored(self, family: DeviceFamily, device: torch.device) -> None:
        if family.spec.rng_key is None:
            pytest.skip("draws from the generator of the CPU")
        saved = io.BytesIO()
        torch.save(family.rng_state(), saved)
        current = family.current_rng_state()
        first = torch.rand(4, device=device).cpu()
        family.set_rng_state(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
        assert torch.equal(torch.rand(4, device=device).cpu(), first)
        family.set_current_rng_state(current)
        assert torch.equal(torch.rand(4, device=device).cpu(), first)

    def test_generators_are_separate_from_that_of_the_cpu(self, family: DeviceFamily, device: torch.device) -> None:
        if family.spec.rng_key is None:
            pytest.skip("draws from the generator of the CPU")
        before = torch.get_rng_state()
        torch.rand(4, device=device)
        assert torch.equal(torch.get_rng_state(), before)
        others = [other.spec.rng_key for other in families() if other.name != family.name]
        assert family.spec.rng_key not in others

    def test_memory_is_counted(self, family: DeviceFamily, device: torch.device) -> None:
        try:
            total, used = family.total_memory(), family.used_memory()
            held = torch.ones(1024, device=device)
            assert 0 <= family.free_memory() <= total
            assert used <= family.used_memory() <= total
        except NotOffered:
            pytest.skip("does not count its memory")
        del held

    def test_the_peak_of_memory_is_counted(self, family: DeviceFamily, device: torch.device) -> None:
        try:
            family.reset_peak_memory()
        except NotOffered:
            pytest.skip("does not count the peak of its memory")
        before = family.peak_memory()
        held = torch.ones(4096, device=device)
        del held
        assert family.peak_memory() >= before + 4 * 4096

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_autocast_uses_the_supported_dtypes(
        self, family: DeviceFamily, device: torch.device, dtype: torch.dtype
    ) -> None:
        if not family.supports(dtype):
            pytest.skip(f"does not autocast to {dtype}")
        model = torch.nn.Linear(3, 2).to(device)
        with torch.autocast(family.name, dtype=dtype):
            assert model(torch.ones(1, 3, device=device)).dtype is dtype

    def test_nothing_autocasts_to_double_precision(self, family: DeviceFamily) -> None:
        assert not family.supports(torch.float64)

    def test_gradients_that_overflow_skip_the_step(self, family: DeviceFamily, device: torch.device) -> None:
        if not family.supports(torch.float16):
            pytest.skip("does not autocast to float16")
        parameter = torch.nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler = family.grad_scaler(init_scale=4.0)
        for factor, expected in ((float("inf"), 1.0), (1.0, 0.9)):
            optimizer.zero_grad()
            loss: Any = scaler.scale((parameter * factor).sum())
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            torch.testing.assert_close(parameter.detach().cpu(), torch.full((2,), expected))

    def test_other_errors_do_not_count_as_out_of_memory(self, family: DeviceFamily) -> None:
        assert not family.out_of_memory(RuntimeError("shapes do not fit"))
        assert not family.out_of_memory(ValueError(f"{family.name} out of memory"))

    def test_synchronize_and_empty_cache_work_at_any_time(self, family: DeviceFamily, device: torch.device) -> None:
        family.synchronize()
        family.empty_cache()
        family.check_fork()

    def test_two_processes_gather_on_it(self, family: DeviceFamily, two: Processes) -> None:
        try:
            family.distributed_backend()
        except NotOffered:
            pytest.skip("has no collectives")
        if family.spec.priority < max(other.spec.priority for other in families() if other.present()):
            pytest.skip("another device would be taken")
        assert two.run(_gather_ranks, type(self).around) == [(family.name, [0.0, 1.0])] * 2
