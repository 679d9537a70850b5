"""The built-in backends pass the suite that everybody else's have to pass."""

from __future__ import annotations

import pytest

from accel_plugins import DistributedDataParallelKwargs
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_testing.backends import BackendSuite
from accel_testing.backends.base import Run


class TestSingle(BackendSuite):
    target = "accel_plugins.single.manifest:MANIFEST"
    processes = 1


class TestDDP(BackendSuite):
    target = "accel_plugins.ddp.manifest:MANIFEST"


# The quick tests give views to the suite that runs through the Accelerator.
@pytest.mark.slow
class TestDDPWithViews(BackendSuite):
    target = "accel_plugins.ddp.manifest:MANIFEST"
    config = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)

    @pytest.mark.xfail(strict=True, reason="broadcast_buffers=False leaves each process the buffers that it made")
    def test_set_up_makes_all_processes_start_with_the_weights_of_the_first(self, run: Run) -> None:
        super().test_set_up_makes_all_processes_start_with_the_weights_of_the_first(run)


class TestFSDP1(BackendSuite):
    target = "accel_plugins.fsdp.manifest:FSDP1"
    config = FullyShardedDataParallelPlugin(1)


class TestFSDP2(BackendSuite):
    target = "accel_plugins.fsdp.manifest:FSDP2"
    config = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50)


class TestFSDP2InOneFile(BackendSuite):
    target = "accel_plugins.fsdp.manifest:FSDP2"
    config = FullyShardedDataParallelPlugin(2, reshard_after_forward=False, state_dict_type="FULL_STATE_DICT")
