"""The manifest of the data-parallel backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import PROTOCOL, Axis, Capabilities, Manifest

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("MANIFEST", "present")


def present(process: Process) -> bool:
    """Whether a launcher started the process as part of a run, so that a process group can be formed."""
    return process.backend is not None


MANIFEST: Final = Manifest(
    name="ddp",
    config="accel_plugins.ddp.config:DistributedDataParallelKwargs",
    strategy="accel_plugins.ddp.strategy:DDPStrategy",
    present="accel_plugins.ddp.manifest:present",
    axes=frozenset({Axis.REPLICATE, Axis.CONTEXT, Axis.SEQUENCE}),
    capabilities=Capabilities(unused_parameters=False, syncs_in_own_forward=True),
    priority=10,
    tier=1,
    protocol=PROTOCOL,
)
