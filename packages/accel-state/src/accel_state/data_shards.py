"""Which processes read the same samples: those along the mesh axes tp, cp and sp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state import current
from accel_state.settings.environ import from_environment
from accel_state.settings.run import MeshSettings

if TYPE_CHECKING:
    from accel_state.identity import Process
    from accel_state.mesh import ParallelismConfig

__all__ = ("data_shard", "parallelism_config_from_environment")


def parallelism_config_from_environment() -> ParallelismConfig | None:
    """The `ParallelismConfig` that the launcher set, or None without ACCELERATE_USE_PARALLELISM_CONFIG."""
    if not from_environment(MeshSettings).use_parallelism_config:
        return None
    # Loaded only if there is a mesh.
    from accel_state.mesh import ParallelismConfig

    return ParallelismConfig()


def data_shard(process: Process) -> tuple[int, int]:
    """The number of data shards of the run, and the index of the one that a process reads.

    Processes along the axes tp, cp and sp read the same samples. Before there is a run, the sizes of axes are those of
    the environment.
    """
    run = current.run_or_none()
    config = parallelism_config_from_environment() if run is None else run.parallelism_config
    if config is None or process.world_size == 1:
        return process.world_size, process.rank
    # These axes are the innermost ones.
    together = config.non_data_parallel_size
    return process.world_size // together, process.rank // together
