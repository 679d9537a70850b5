"""The manifest of the single-process backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import PROTOCOL, Manifest
from accel_state.labels import DistributedType

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("MANIFEST", "present")


def present(process: Process) -> bool:
    """Whether the run has one process."""
    return process.world_size == 1


MANIFEST: Final = Manifest(
    name="single",
    strategy="accel_plugins.single.strategy:SingleStrategy",
    label=DistributedType.NO,
    present="accel_plugins.single.manifest:present",
    tier=1,
    protocol=PROTOCOL,
)
