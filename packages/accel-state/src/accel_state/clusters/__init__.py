"""What batch systems and launchers tell the processes and machines of a run: one class for each of them.

The classes are found through the entry-point group `accel.clusters`; those of other packages are asked first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

from accel_state.errors import SettingError
from accel_state.plugins import Interface, Plugin, PluginGroup
from accel_state.settings.environ import Given
from accel_state.settings.schema import Setting, int_at_least

__all__ = ("CLUSTERS", "ClusterEnvironment", "Machines", "cluster_environments", "machines_of")

_NATURAL_NUMBER: Final = int_at_least(0)


class Machines(NamedTuple):
    """What a system that starts one launcher on each machine says about the machines.

    Args:
        system: name of the system; empty without one.
        values: values of the launch's settings by name, such as "num_machines", each with the variable that says so.
        launchers: number of launchers that the system started on this machine.
        restarts: number of restarts of the whole run by the system.
    """

    system: str = ""
    values: Mapping[str, Given] = MappingProxyType({})
    launchers: int = 1
    restarts: int = 0


class ClusterEnvironment:
    """The variables of one batch system or launcher.

    A subclass names the variables of the ranks, or defines the methods itself. A system may start every process of a
    run (`started_process`), or one launcher on each machine (`machines`).

    Args:
        environ: variables to read.
        host: name of this machine.

    Attributes:
        name: name of the system in messages.
        rank_names, world_size_names, local_rank_names, local_world_size_names, node_rank_names: variables with the
            ranks; of several, the first that is set counts.
    """

    name: ClassVar[str] = ""
    rank_names: ClassVar[tuple[str, ...]] = ()
    world_size_names: ClassVar[tuple[str, ...]] = ()
    local_rank_names: ClassVar[tuple[str, ...]] = ("LOCAL_RANK",)
    local_world_size_names: ClassVar[tuple[str, ...]] = ("LOCAL_WORLD_SIZE",)
    node_rank_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, environ: Mapping[str, str], host: str = "") -> None:
        self.environ, self.host = environ, host

    def started_process(self) -> bool:
        """Whether the system started this process as one of the run, and not once for the whole machine or job."""
        return self.first(self.world_size_names) is not None

    def rank(self) -> int:
        """Rank of the process.

        Raises:
            SettingError: it is one of several, and its rank is not set.
        """
        rank, size = self.number(self.rank_names), self.world_size()
        if rank is None and size > 1:
            raise SettingError(
                f"Cannot read the rank of this process, one of {size} ({self.name}).",
                f"{self.rank_names[0]} is not set.",
                f"Set it, unset {self.world_size_names[0]}, or start the script with `accel launch`, which sets both.",
            )
        return rank or 0

    def world_size(self) -> int:
        """Number of processes of the run."""
        size = self.number(self.world_size_names)
        return 1 if size is None else size

    def local_rank(self) -> int:
        """Rank on the node."""
        rank = self.number(self.local_rank_names)
        return self.rank() % max(self.local_world_size(), 1) if rank is None else rank

    def local_world_size(self) -> int:
        """Number of processes on the node; all of them if it is unknown."""
        size = self.number(self.local_world_size_names)
        return self.world_size() if size is None else size

    def node_rank(self) -> int:
        """Index of the node."""
        rank = self.number(self.node_rank_names)
        return self.rank() // max(self.local_world_size(), 1) if rank is None else rank

    def address(self) -> tuple[str | None, int | None]:
        """Host and port of the store, where MASTER_ADDR and MASTER_PORT are not set; None for what is unknown."""
        return None, None

    def machines(self) -> Machines | None:
        """The machines of a run for a launcher on this machine; None if the system did not start it.

        Raises:
            SettingError: a variable that must be a number is not one.
        """
        return None

    def first(self, names: tuple[str, ...]) -> str | None:
        """The first of these variables that is set and not empty."""
        return next((name for name in names if self.environ.get(name, "").strip()), None)

    def number(self, names: tuple[str, ...]) -> int | None:
        """The number in the first of these variables that is set, or None.

        Raises:
            SettingError: it is not an integer of at least 0.
        """
        name = self.first(names)
        if name is None:
            return None
        number: int = Setting(name, _NATURAL_NUMBER, variable=name).parse(self.environ[name], f"${name}")
        return number

    def machine_number(self, name: str) -> Given:
        """The number in a variable that describes a machine, with its origin.

        Raises:
            SettingError: it is not an integer of at least 0.
        """
        if re.fullmatch(r"\s*\d+\s*", self.environ[name]) is None:
            raise SettingError(
                f"Cannot read the rank of this machine from {name}={self.environ[name]!r}.",
                "The value must be an integer of at least 0.",
                f"Unset {name}, or set --num_machines and --machine_rank.",
            )
        return Given(int(self.environ[name]), f"${name}")


# ---------------------------------------------------------------------- the systems that are asked

_GROUP: Final = "accel.clusters"
_PACKAGE: Final = "accel-state"
_BUILT_IN_CLUSTERS: Final = (
    ("torchrun", "TorchrunEnvironment"),
    ("jobset", "JobSetEnvironment"),
    ("kubernetes", "TrainingJobEnvironment"),
    ("openmpi", "OpenMPIEnvironment"),
    ("mvapich", "MVAPICHEnvironment"),
    ("intel-mpi", "IntelMPIEnvironment"),
    ("slurm", "SlurmEnvironment"),
    ("lsf", "LSFEnvironment"),
    ("sagemaker", "SageMakerEnvironment"),
    ("pmi", "PMIEnvironment"),
)
"""The most specific first: Slurm and LSF start MPI, and several systems set the variables of PMI."""

CLUSTERS: Final[PluginGroup[type[ClusterEnvironment]]] = PluginGroup(
    _GROUP,
    "cluster environment",
    interface=Interface(subclass_of=ClusterEnvironment),
    own="last",
    built_in=tuple(
        Plugin(_GROUP, name, f"accel_state.clusters.systems:{target}", _PACKAGE) for name, target in _BUILT_IN_CLUSTERS
    ),
)
"""The systems whose variables are read."""


def cluster_environments(environ: Mapping[str, str], host: str = "") -> Iterator[ClusterEnvironment]:
    """An object for each system, in the order in which they are asked; broken plugins are left out.

    Args:
        environ: variables to read.
        host: name of this machine, which some systems list.
    """
    order = [name for name, _ in _BUILT_IN_CLUSTERS]
    loaded = sorted(CLUSTERS.loaded(), key=lambda one: order.index(one.name) if one.plugin.is_own else -1)
    for cluster in loaded:
        if cluster.value is not None:
            yield cluster.value(environ, host)


def machines_of(environ: Mapping[str, str]) -> Machines:
    """What the first system that knows this machine says about the machines of a run; empty if none does.

    Raises:
        SettingError: a variable that must be a number is not one.
    """
    host = os.uname().nodename if hasattr(os, "uname") else ""
    answers = (cluster.machines() for cluster in cluster_environments(environ, host))
    return next((machines for machines in answers if machines is not None), Machines())
