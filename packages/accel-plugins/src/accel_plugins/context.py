"""What a strategy or a transform can read about its run; it never receives the Accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.manifest import Manifest
    from accel_plugins.precision.base import Precision
    from accel_state.current import Process
    from accel_state.gradient import GradientState
    from accel_state.mesh import ParallelismConfig

__all__ = ("Context",)


class Context(NamedTuple):
    """The context of a strategy, read-only.

    Args:
        process: this process: its rank, device and transport.
        gradient: the gradient state: whether gradients are synchronised at this step.
        precision: the precision in which forward and backward are computed.
        mesh: the devices of the run by axis, or None without axes.
        parallelism_config: the axes of the run, including those that an engine manages outside of the mesh.
        manifest: the backend's manifest; None for a strategy that user code created directly.
    """

    process: Process
    gradient: GradientState
    precision: Precision
    mesh: DeviceMesh | None = None
    parallelism_config: ParallelismConfig | None = None
    manifest: Manifest | None = None
