"""The built-in backends pass the kit on a GPU, and on the simulated device where there is no GPU.

FSDP changes the size of storages in place, which the simulated device cannot follow: without a GPU it runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_testing.backends import BackendSuite
from accel_testing.plugin import GPU_PROCESSES
from accel_testing.processes import Processes
from accel_testing.simulated_device import POSSIBLE

Run = Callable[..., list[Any]]

simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have the simulated device here")

SHARDED = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50)
OFFLOADED = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50, cpu_offload=True)


class OnSimulated(BackendSuite):
    @pytest.fixture
    def driver(self) -> str:
        return "accel_testing.backends.reference_loop:SimulatedTraining"


@simulated
class TestSingleOnSimulated(OnSimulated):
    target = "accel_plugins.single.manifest:MANIFEST"
    processes = 1


@simulated
class TestDDPOnSimulated(OnSimulated):
    target = "accel_plugins.ddp.manifest:MANIFEST"

    @pytest.mark.xfail(strict=True, reason="tensors of the simulated device are of a subclass, which reduce() refuses")
    def test_averaging_gives_everyone_the_mean(self, run: Run) -> None:
        super().test_averaging_gives_everyone_the_mean(run)


class TestFSDP2OffloadedOnCPU(BackendSuite):
    target = "accel_plugins.fsdp.manifest:FSDP2"
    config = OFFLOADED


class OnCUDA(BackendSuite):
    """One process shows NCCL's calls and streams, and no communication; GPU_PROCESSES gives more."""

    processes = GPU_PROCESSES
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture
    def driver(self) -> str:
        return "accel_testing.backends.reference_loop:CUDATraining"

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls) -> Iterator[Processes]:
        with Processes(cls.processes) as group:
            yield group


@pytest.mark.cuda(differs="kernels run after their call has returned, and add up in another order")
class TestSingleOnCUDA(OnCUDA):
    target = "accel_plugins.single.manifest:MANIFEST"
    processes = 1


@pytest.mark.cuda(differs="NCCL averages gradients on a stream of its own while backward goes on")
class TestDDPOnCUDA(OnCUDA):
    target = "accel_plugins.ddp.manifest:MANIFEST"


@pytest.mark.cuda(differs="parameters are gathered on a stream of their own, ahead of the layer that needs them")
class TestFSDP2OnCUDA(OnCUDA):
    target = "accel_plugins.fsdp.manifest:FSDP2"
    config = SHARDED


@pytest.mark.cuda(differs="shards are in pinned memory of the host, and NCCL moves nothing that is there")
class TestFSDP2OffloadedOnCUDA(OnCUDA):
    target = "accel_plugins.fsdp.manifest:FSDP2"
    config = OFFLOADED
