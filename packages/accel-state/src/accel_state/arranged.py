"""The arrangement of processes that the launcher asked for; `accel_state.mesh` is loaded only when there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.mesh_settings import MeshSettings
from accel_state.settings.environ import from_environment

if TYPE_CHECKING:
    from accel_state.mesh import ParallelismConfig

__all__ = ("arrangement_of_environment",)


def arrangement_of_environment() -> ParallelismConfig | None:
    """What the launcher set, or None when it set ACCELERATE_USE_PARALLELISM_CONFIG to nothing or false."""
    if not from_environment(MeshSettings).use_parallelism_config:
        return None
    from accel_state.mesh import ParallelismConfig

    return ParallelismConfig()
