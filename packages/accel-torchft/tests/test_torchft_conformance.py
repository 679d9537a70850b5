"""The backends pass the suites that every backend passes, as runs of one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchft")

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_testing.accelerator import AcceleratorSuite
from accel_testing.backends import BackendSuite
from accel_testing.processes import Processes


@pytest.fixture(scope="module", autouse=True)
def replicas_of_the_run(lighthouse: str) -> Iterator[None]:
    """The environment that the launcher gives a replica."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHFT_LIGHTHOUSE", lighthouse)
        yield


# The suites save after seven steps: in the middle of a round.
SETTINGS = {"ACCEL_TORCHFT_HOST": "127.0.0.1", "ACCEL_TORCHFT_SYNC_EVERY": "4"}


class OneReplica:
    """Starts the processes when the lighthouse is known."""

    processes: int

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, replicas_of_the_run: None) -> Iterator[Processes]:
        with Processes(cls.processes) as group:
            yield group

    @pytest.fixture
    def run(self, group: Processes) -> Callable[..., Any]:
        """With the settings, which each call would otherwise remove from the environment."""
        return partial(group.run, environment=SETTINGS)


class TestSingle(OneReplica, BackendSuite):
    target = "accel_torchft.manifest:TORCHFT"
    processes = 1


class TestSingleThroughTheAccelerator(OneReplica, AcceleratorSuite):
    target = "accel_torchft.manifest:TORCHFT"
    processes = 1


class TestFSDP2(OneReplica, BackendSuite):
    target = "accel_torchft.manifest:TORCHFT_FSDP2"
    config = FullyShardedDataParallelPlugin(fsdp_version=2)


class TestLocalSGD(OneReplica, BackendSuite):
    target = "accel_torchft.manifest:TORCHFT_LOCAL_SGD"
    processes = 1


class TestLocalSGDThroughTheAccelerator(OneReplica, AcceleratorSuite):
    target = "accel_torchft.manifest:TORCHFT_LOCAL_SGD"
    processes = 1


class TestDiLoCo(OneReplica, BackendSuite):
    target = "accel_torchft.manifest:TORCHFT_DILOCO"
    processes = 1


class TestDiLoCoThroughTheAccelerator(OneReplica, AcceleratorSuite):
    target = "accel_torchft.manifest:TORCHFT_DILOCO"
    processes = 1


class TestFSDP2LocalSGD(OneReplica, BackendSuite):
    target = "accel_torchft.manifest:TORCHFT_FSDP2_LOCAL_SGD"
    config = FullyShardedDataParallelPlugin(fsdp_version=2)


class TestFSDP2DiLoCo(OneReplica, BackendSuite):
    target = "accel_torchft.manifest:TORCHFT_FSDP2_DILOCO"
    config = FullyShardedDataParallelPlugin(fsdp_version=2)
