"""Who this process is among the processes of a run, read once from the environment and frozen.

Launchers tell a process its place in different variables; each convention is one row of `SCHEMES`. The first scheme
whose world-size variable is set is taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from accel_state.errors import SettingError

__all__ = ("SCHEMES", "Scheme", "Topology", "read_topology")


@dataclass(frozen=True)
class Scheme:
    """The variables in which one kind of launcher tells a process its place."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()


SCHEMES: Final = (
    Scheme("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK")),
    Scheme(
        "OpenMPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Scheme(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Scheme("Intel MPI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
)


@dataclass(frozen=True)
class Topology:
    """The place of one process.

    Args:
        rank: index among all processes.
        world_size: number of all processes.
        local_rank: index among the processes of this node.
        local_world_size: number of processes of this node.
        node_rank: index of this node.
        master_addr: host that serves the store, or None when the process runs alone.
        master_port: its port.
        attempt: how often the run was restarted, 0 for the first start.
        scheme: name of the convention the place was read from, or "alone".
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
        """Whether the process was started as one of several, or as the only one of a launched run."""
        return self.scheme != "alone"

    @property
    def is_main(self) -> bool:
        """Whether this is the first process of all."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last process of all."""
        return self.rank == self.world_size - 1


def read_topology(environ: Mapping[str, str] | None = None) -> Topology:
    """The place that the environment gives this process; alone when no launcher left a trace.

    Raises:
        SettingError: a variable is not a number, or a rank lies outside its world.
    """
    source = os.environ if environ is None else environ
    for scheme in SCHEMES:
        if _variable(source, scheme.world_size) is not None:
            return _read_scheme(source, scheme)
    return Topology()


def _read_scheme(source: Mapping[str, str], scheme: Scheme) -> Topology:
    world_size = _number(source, scheme.world_size, 1)
    rank = _number(source, scheme.rank, 0)
    local_world_size = _number(source, scheme.local_world_size, world_size)
    local_rank = _number(source, scheme.local_rank, rank % max(local_world_size, 1))
    _check_place(scheme.rank[0], rank, scheme.world_size[0], world_size)
    _check_place(scheme.local_rank[0], local_rank, scheme.local_world_size[0], local_world_size)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_number(source, scheme.node_rank, rank // max(local_world_size, 1)),
        master_addr=source.get("MASTER_ADDR") or None,
        master_port=_number(source, ("MASTER_PORT",), 0) or None,
        attempt=_number(source, ("TORCHELASTIC_RESTART_COUNT",), 0),
        scheme=scheme.name,
    )


def _variable(source: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if source.get(name, "").strip()), None)


def _number(source: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    name = _variable(source, names)
    if name is None:
        return default
    try:
        number = int(source[name])
    except ValueError:
        number = -1
    if number < 0:
        raise SettingError(
            f"The variable {name}={source[name]!r} was read to find this process's place in the run.",
            "It is not a whole number of at least 0.",
            f"Unset {name}, or start the script with `accel launch`, which sets it.",
        )
    return number


def _check_place(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1 or rank >= size:
        raise SettingError(
            f"This process was started as {rank_name}={rank} of {size_name}={size}.",
            "Ranks count from 0 and stay below the number of processes.",
            "Correct the variables, or start the script with `accel launch`, which sets them.",
        )
