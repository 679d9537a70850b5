"""The family of CUDA devices keeps what `DeviceSuite` asks of every family."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.torch_family import CUDA
from accel_testing.devices import DeviceSuite
from accel_testing.processes import Processes


@pytest.mark.cuda(differs="kernels, generators, memory and the scaler are those of a real device")
class TestCUDA(DeviceSuite):
    @pytest.fixture
    def family(self) -> DeviceFamily:
        return CUDA()

    @pytest.fixture
    def two(self) -> Iterator[Processes]:
        if torch.cuda.device_count() < 2:
            pytest.skip("NCCL gives two processes no GPU together, and there is one")
        with Processes(2) as group:
            yield group
