"""Whether the processes form a mesh at all; how, `accel_state.mesh` says."""

from __future__ import annotations

from typing import Final

from accel_state.settings.schema import BOOLEAN, setting, table

__all__ = ("MESH_GROUP", "MeshSettings")

MESH_GROUP: Final = "ParallelismConfig"
"""Heading of the settings of a mesh in lists for users."""


@table
class MeshSettings:
    """Whether the processes form a mesh at all."""

    use_parallelism_config: bool = setting(
        False,
        kind=BOOLEAN,
        variable="ACCELERATE_USE_PARALLELISM_CONFIG",
        flag="--use_parallelism_config",
        key="use_parallelism_config",
        help="Arrange the processes as the ParallelismConfig options say.",
        group=MESH_GROUP,
    )
    allow_cp_standalone: bool = setting(
        False,
        kind=BOOLEAN,
        variable="ACCELERATE_ALLOW_CP_STANDALONE",
        help="Allow context parallelism without a backend that divides the parameters.",
    )
