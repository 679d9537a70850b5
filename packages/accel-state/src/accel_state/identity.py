"""`Process` and `Run`: the immutable records behind the states."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_state.labels import DistributedType

if TYPE_CHECKING:
    import torch

    from accel_state.devices.base import DeviceFamily
    from accel_state.mesh import ParallelismConfig
    from accel_state.topology import Topology
    from accel_state.transport.base import Transport

__all__ = ("Process", "Run")


class Process(NamedTuple):
    """Rank, device and transport of this process; created once, with the first state or Accelerator.

    Args:
        topology: its ranks and world sizes.
        device: its device.
        family: the family of that device.
        transport: moves tensors between this process and the others.
        distributed_type: the label of the device family when there are several processes, else NO.
        backend: name of the torch.distributed backend; None in a single process.
        debug: whether collectives report more.
        fork_launched: whether a notebook forked it.
        options: the arguments with which it was created.
        inherited: whether it describes the parent from which this process was forked.
    """

    topology: Topology
    device: torch.device
    family: DeviceFamily
    transport: Transport
    distributed_type: DistributedType
    backend: str | None = None
    debug: bool = False
    fork_launched: bool = False
    options: Mapping[str, Any] = MappingProxyType({})
    inherited: bool = False

    @property
    def rank(self) -> int:
        """Index among all processes."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return self.transport.world_size


class Run(NamedTuple):
    """Precision, strategy and mesh of a run. The first Accelerator creates it, later ones share it.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        distributed_type: the label of the backend, else that of the process.
        strategy: the strategy that owns the run; opaque to this layer.
        options: options that were passed as arguments, by name; a second Accelerator must not contradict them.
        mesh: the device mesh, or None.
        parallelism_config: the sizes of the axes of the mesh, or None.
        selected: name of the engine configuration in use if there are several; None for the first one.
    """

    mixed_precision: str
    distributed_type: DistributedType
    strategy: Any = None
    options: Mapping[str, Any] = MappingProxyType({})
    mesh: Any = None
    parallelism_config: ParallelismConfig | None = None
    selected: str | None = None
