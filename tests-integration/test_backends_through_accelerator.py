"""The backends pass their suite through the Accelerator as well, not only through the kit's own loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_plugins.testing import BackendSuite, Processes
from accel_torch import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

HERE = str(Path(__file__).parent)


class ThroughAccelerator(BackendSuite):
    """The suite, driven by an Accelerator that the processes find beside this file."""

    session = "accelerator_session:AcceleratorSession"

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls) -> Iterator[Processes]:
        sys.path.insert(0, HERE)
        try:
            with Processes(cls.processes) as group:
                yield group
        finally:
            sys.path.remove(HERE)


class TestSingle(ThroughAccelerator):
    target = "accel_plugins.single.manifest:MANIFEST"
    processes = 1


class TestDDP(ThroughAccelerator):
    target = "accel_plugins.ddp.manifest:MANIFEST"
    config = DistributedDataParallelKwargs(gradient_as_bucket_view=True)


class TestFSDP2(ThroughAccelerator):
    target = "accel_plugins.fsdp.manifest:FSDP2"
    config = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50)
