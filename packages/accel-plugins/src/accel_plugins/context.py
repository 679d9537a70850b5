"""What a strategy or a transform may know of the run it takes part in; it is never given the Accelerator."""

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
        process: who this process is, its device and its way to the others.
        gradient: whether gradients are synchronised at this step.
        precision: how forward and backward are computed.
        mesh: the devices of the run by axis, or None without axes.
        parallelism_config: the axes of the run, including those that an engine manages outside of the mesh.
        manifest: what the backend declares about itself; None for a strategy that was made by hand.
    """

    process: Process
    gradient: GradientState
    precision: Precision
    mesh: DeviceMesh | None = None
    parallelism_config: ParallelismConfig | None = None
    manifest: Manifest | None = None
