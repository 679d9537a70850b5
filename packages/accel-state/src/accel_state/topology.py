"""The rank and world size of this process, read once from the environment and frozen.

Launchers set them in different variables; each convention is one entry of `SCHEMES`. `read_topology` uses the first
scheme that applies.
"""

from __future__ import annotations

import os
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from accel_state.errors import SettingError
from accel_state.settings.schema import Setting, int_at_least

__all__ = (
    "SCHEMES",
    "Scheme",
    "Topology",
    "derive_from_slurm",
    "first_host",
    "in_batch_script",
    "read_topology",
    "tasks_of_node",
)

_NATURAL: Final = int_at_least(0)

_FIRST_SLURM_PORT: Final = 15000
_SLURM_PORTS: Final = 10000
"""Ports for the store of a job, below the range that operating systems assign to clients."""


def _meet_here(world_size: str, local_world_size: str) -> Callable[[Mapping[str, str]], Mapping[str, str]]:
    """The address of the store, which MPI does not set: this machine, if all processes are on one node."""

    def derive(source: Mapping[str, str]) -> dict[str, str]:
        from accel_state.network import DEFAULT_PORT

        one_node = source.get(world_size) == source.get(local_world_size)
        return {"MASTER_PORT": str(DEFAULT_PORT), **({"MASTER_ADDR": "127.0.0.1"} if one_node else {})}

    return derive


def in_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is the script of a job, which Slurm starts once, and not a step, which `srun` starts."""
    in_job = "SLURM_JOB_ID" in environ
    in_step = any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    return in_job and not in_step


def derive_from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of torchrun, derived from those of Slurm."""
    derived = {}
    tasks = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    node = environ.get("SLURM_NODEID", "0")
    local_tasks = tasks_of_node(tasks, int(node)) if tasks and node.isdecimal() else None
    if local_tasks is not None:
        derived["LOCAL_WORLD_SIZE"] = str(local_tasks)
    hosts = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts:
        derived["MASTER_ADDR"] = first_host(hosts)
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdecimal():
        step = environ.get("SLURM_STEP_ID", "")
        derived["MASTER_PORT"] = str(
            _FIRST_SLURM_PORT + (int(job) + int(step if step.isdecimal() else 0)) % _SLURM_PORTS
        )
    return derived


def tasks_of_node(tasks: str, node: int) -> int | None:
    """Number of tasks on a node, from a list such as "2(x3),1"; None when the list has fewer nodes.

    Example:
        >>> [tasks_of_node("2(x2),1", node) for node in range(4)]
        [2, 2, 1, None]
    """
    for part in tasks.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            return None
        nodes = int(match[2] or 1)
        if node < nodes:
            return int(match[1])
        node -= nodes
    return None


def first_host(hosts: str) -> str:
    """First host of a list of hosts in the short form of Slurm.

    Example:
        >>> first_host("gpu[007-009,012],login1"), first_host("a,b")
        ('gpu007', 'a')
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts.strip())[0])


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name, "").strip()), None)


class Scheme(NamedTuple):
    """The variables in which a type of launcher sets rank and world size.

    Args:
        name: name of the launcher in messages.
        rank: variables with the rank; the first that is set counts, as for the next four.
        world_size: world size; this launcher started the process only if such a variable is set.
        local_rank: rank on the node.
        local_world_size: number of processes on the node.
        node_rank: index of the node.
        needs: a variable that this launcher always sets.
        unless: returns whether the launcher started a single process although the variables are set.
        derive: returns variables of torchrun, derived from those of this launcher; set variables have precedence.
    """

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    needs: str | None = None
    unless: Callable[[Mapping[str, str]], bool] | None = None
    derive: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None

    def applies(self, source: Mapping[str, str]) -> bool:
        """Whether a launcher of this type started the process."""
        if _variable(source, self.world_size) is None or (self.needs and not _variable(source, (self.needs,))):
            return False
        return self.unless is None or not self.unless(source)


SCHEMES: Final = (
    Scheme(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        # The second of these, and the third of the next, are those of DeepSpeed's launcher.
        ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        ("GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
    ),
    Scheme(
        "OpenMPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        derive=_meet_here("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    Scheme(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        derive=_meet_here("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    Scheme(
        "Intel MPI",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID",),
        ("MPI_LOCALNRANKS",),
        needs="MPI_LOCALRANKID",
        derive=_meet_here("PMI_SIZE", "MPI_LOCALNRANKS"),
    ),
    Scheme(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("LOCAL_WORLD_SIZE",),
        ("SLURM_NODEID",),
        needs="SLURM_PROCID",
        unless=in_batch_script,
        derive=derive_from_slurm,
    ),
    # Slurm and others set this part of the variables of Intel MPI too, without local ranks.
    Scheme(
        "PMI",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        derive=_meet_here("PMI_SIZE", "LOCAL_WORLD_SIZE"),
    ),
)


_NAMES: Final = frozenset(scheme.name for scheme in SCHEMES)


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
        scheme: name of the scheme from which it was read, "process group" if the script itself created one, or
            "alone" for a single process.
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
        return self.scheme in _NAMES

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
    """The topology of this process; a single process when no scheme applies.

    Raises:
        SettingError: a variable is not a number, a rank is missing, or a rank is not below its world size.
    """
    source = os.environ if environ is None else environ
    for scheme in SCHEMES:
        if scheme.applies(source):
            derived = scheme.derive(source) if scheme.derive is not None else {}
            return _read_scheme(ChainMap(dict(source), dict(derived)), scheme)
    return Topology()


def _read_scheme(source: Mapping[str, str], scheme: Scheme) -> Topology:
    world_size = _number(source, scheme.world_size, 1)
    _check_rank_is_set(source, scheme, world_size)
    rank = _number(source, scheme.rank, 0)
    local_world_size = _number(source, scheme.local_world_size, world_size)
    local_rank = _number(source, scheme.local_rank, rank % max(local_world_size, 1))
    _check_range(scheme.rank[0], rank, scheme.world_size[0], world_size)
    _check_range(scheme.local_rank[0], local_rank, scheme.local_world_size[0], local_world_size)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_number(source, scheme.node_rank, rank // max(local_world_size, 1)),
        master_addr=source.get("MASTER_ADDR") or None,
        master_port=_number(source, ("MASTER_PORT",), 0) or None,
        attempt=_number(source, ("TORCHELASTIC_RESTART_COUNT",), 0) if _shares_store(source) else 0,
        scheme=scheme.name,
    )


def _shares_store(source: Mapping[str, str]) -> bool:
    """Whether the agent of torch.distributed.run serves one store for all attempts."""
    return source.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _variable(source: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if source.get(name, "").strip()), None)


def _number(source: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    name = _variable(source, names)
    if name is None:
        return default
    number: int = Setting(name, _NATURAL, variable=name).parse(source[name], f"${name}")
    return number


def _check_rank_is_set(source: Mapping[str, str], scheme: Scheme, world_size: int) -> None:
    if world_size > 1 and _variable(source, scheme.rank) is None:
        raise SettingError(
            f"Cannot read the rank of this process, one of {world_size} ({scheme.name}).",
            f"{scheme.rank[0]} is not set.",
            f"Set it, unset {scheme.world_size[0]}, or start the script with `accel launch`, which sets both.",
        )


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1 or rank >= size:
        raise SettingError(
            f"Cannot use {rank_name}={rank} with {size_name}={size}.",
            "A rank must be at least 0 and below the number of processes.",
            "Correct the variables, or start the script with `accel launch`, which sets them.",
        )
