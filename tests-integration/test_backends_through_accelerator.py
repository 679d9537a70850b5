"""The backends pass their suite through the Accelerator as well, not only through the kit's own loop."""

from __future__ import annotations

from accel_testing.accelerator import AcceleratorSuite
from accel_torch import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin


class TestSingle(AcceleratorSuite):
    target = "accel_plugins.single.manifest:MANIFEST"
    processes = 1


class TestDDP(AcceleratorSuite):
    target = "accel_plugins.ddp.manifest:MANIFEST"
    config = DistributedDataParallelKwargs(gradient_as_bucket_view=True)


class TestFSDP2(AcceleratorSuite):
    target = "accel_plugins.fsdp.manifest:FSDP2"
    config = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50)
