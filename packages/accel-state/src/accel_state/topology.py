"""The rank and world size of this process, read once from the environment and frozen.

Launchers and batch systems set them in different variables; `accel_state.clusters` has a class for each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from accel_state.clusters import ClusterEnvironment, cluster_environments
from accel_state.errors import SettingError

__all__ = ("Topology", "read_topology")

_NOT_LAUNCHED: Final = frozenset(("alone", "process group", "torch_xla"))
"""Values of `Topology.scheme` of processes that no launcher described."""


class Topology(NamedTuple):
    """The ranks of one process, and the address of the store.

    Args:
        rank: rank of the process.
        world_size: number of processes of the run.
        local_rank: rank on this node.
        local_world_size: number of processes on this node.
        node_rank: index of this node.
        master_addr: host of the store; None in a single process.
        master_port: port of the store.
        attempt: number of restarts of the run, if all attempts share a store. If each attempt has its own store, it is
            always 0, because a machine that replaced another one counts only its own restarts.
        scheme: name of the system that set it, such as "Slurm" (see `accel_state.clusters`), "process group" if the
            script itself created one, or "alone" for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    attempt: int = 0
    scheme: str = "alone"

    @property
    def distributed(self) -> bool:
        """Whether a launcher started the process, even if it is the only one of the run."""
        return self.scheme not in _NOT_LAUNCHED

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is local rank 0."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.world_size - 1

    def variables(self) -> dict[str, str]:
        """The topology as variables of torchrun, which other libraries read."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def read_topology(environ: Mapping[str, str] | None = None) -> Topology:
    """The topology of this process; a single process if no system says that it is one of a run.

    Raises:
        SettingError: a variable is not a number, a rank is missing, or a rank is not below its world size.
    """
    source = os.environ if environ is None else environ
    for cluster in cluster_environments(source):
        if cluster.started_process():
            return _topology_of(cluster)
    return Topology()


def _topology_of(cluster: ClusterEnvironment) -> Topology:
    world_size, rank = cluster.world_size(), cluster.rank()
    local_world_size, local_rank = cluster.local_world_size(), cluster.local_rank()
    _check_range(cluster.rank_names[0], rank, cluster.world_size_names[0], world_size)
    _check_range(cluster.local_rank_names[0], local_rank, cluster.local_world_size_names[0], local_world_size)
    host, port = cluster.address()
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=cluster.node_rank(),
        master_addr=cluster.environ.get("MASTER_ADDR") or host,
        master_port=(cluster.number(("MASTER_PORT",)) or None) if cluster.first(("MASTER_PORT",)) else port,
        attempt=(cluster.number(("TORCHELASTIC_RESTART_COUNT",)) or 0) if _shares_store(cluster.environ) else 0,
        scheme=cluster.name,
    )


def _shares_store(environ: Mapping[str, str]) -> bool:
    """Whether the agent of torch.distributed.run serves one store for all attempts."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1 or rank >= size:
        raise SettingError(
            f"Cannot use {rank_name}={rank} with {size_name}={size}.",
            "A rank must be at least 0 and below the number of processes.",
            "Correct the variables, or start the script with `accel launch`, which sets them.",
        )
