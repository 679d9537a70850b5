"""Gradients that FSDP2 keeps on the host are clipped over a group that moves tensors of the device only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel_plugins import Context
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.precision import choose
from accel_plugins.resolve import build
from accel_state import PartialState, current
from accel_state.gradient import GradientState
from accel_testing.plugin import SIMULATED, working_on
from accel_testing.processes import Processes
from accel_testing.simulated_device import POSSIBLE

VALUES = torch.arange(1.0, 7.0)


def offloaded(values: torch.Tensor, mesh: Any) -> Any:
    """What FSDP2 makes of a tensor that it offloads: divided over a mesh of devices, its shard on the host."""
    divided: Any = distribute_tensor(values.to(SIMULATED), mesh, [Shard(0)])
    return DTensor(divided.to_local().cpu(), divided._spec, requires_grad=False)


def clip(norm_type: float, kind: str) -> tuple[float, list[float]]:
    with working_on(kind):
        PartialState()
        process = current.process()
        strategy = build(
            FSDP2,
            FullyShardedDataParallelPlugin(2, cpu_offload=True),
            Context(process, GradientState(), choose("no", process.family)),
        )
        mesh = init_device_mesh(SIMULATED, (process.world_size,))
        parameter = torch.nn.Parameter(offloaded(torch.zeros(6), mesh))
        parameter.grad = offloaded(VALUES, mesh)
        norm = strategy.clip_norm([parameter], 1.0, norm_type)
        assert norm is not None
        return norm.item(), parameter.grad.to_local().tolist()  # type: ignore[attr-defined]


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have the simulated device here")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_is_that_of_all_shards(two: Processes, norm_type: float) -> None:
    norm = torch.linalg.vector_norm(VALUES, norm_type).item()
    clipped = []
    for found, shard in two.run(clip, norm_type, SIMULATED):
        assert found == pytest.approx(norm)
        clipped += shard
    assert clipped == pytest.approx([value / norm for value in VALUES.tolist()], rel=1e-4)
