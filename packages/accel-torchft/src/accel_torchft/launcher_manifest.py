"""The manifest of the launcher.

It is separate from the backends' manifests, because `accel_cli` reads those during its own import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_cli.launch.interface import LauncherManifest
from accel_torchft.manifest import MANIFESTS, NEEDED

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("LAUNCHER", "called_for")


def called_for(request: LaunchRequest) -> str | None:
    """The setting that selects this launcher: a backend of this package, or None."""
    backend = request.settings["backend"]
    return backend.text if backend.value in MANIFESTS else None


LAUNCHER: Final = LauncherManifest(
    "torchft",
    "accel_torchft.launcher:ReplicaGroups",
    help="start a lighthouse and replicas, and restart replicas that were killed",
    called_for=called_for,
    priority=45,
    requires=(NEEDED,),
)
"""Starts the replicas of this machine."""
