"""Collectives of the simulated device: a torch.distributed backend that moves its tensors over gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from accel_state.testing.simulated_tensor import SimulatedTensor

__all__ = ("BACKEND", "SimulatedGroup")

BACKEND: Final = "simulated_ccl"
"""Name of the backend."""

_SAME: Final = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
_RENAMED: Final = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
"""Names of torch 2.13 and later for what gloo calls by its older names."""


class SimulatedGroup(dist.ProcessGroup):
    """A process group that hands the CPU tensors behind simulated ones to gloo.

    Args:
        store: where the processes meet.
        rank: index of this process.
        size: number of processes.
        timeout: how long a collective may take.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the declared signature is that of another overload
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self) -> Any:
        """The name torch.distributed gave the group."""
        name: Any = dist.distributed_c10d._world.pg_names[self]
        return name

    def getBackendName(self) -> str:  # noqa: N802 - the name torch calls
        return BACKEND


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor behind a simulated one; others are refused, as NCCL refuses what is not on its device."""
    if not isinstance(tensor, SimulatedTensor):
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    return tensor.raw


def _over_gloo(name: str) -> Callable[..., Any]:
    def call(self: SimulatedGroup, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _raw, (args, kwargs))
        return getattr(self.gloo, name)(*args, **kwargs)

    return call


for _name in _SAME:
    setattr(SimulatedGroup, _name, _over_gloo(_name))
for _name, _older in _RENAMED.items():
    setattr(SimulatedGroup, _name, _over_gloo(_older))
