"""What batch systems and launchers tell the processes and machines of a run: one class for each of them.

The classes are found through the entry-point group `accel.clusters`; those of other packages are asked first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from accel_state.clusters.base import ClusterEnvironment, Machines
from accel_state.plugins import Interface, Plugin, PluginGroup

__all__ = ("CLUSTERS", "ClusterEnvironment", "Machines", "cluster_environments", "machines_of")

_GROUP: Final = "accel.clusters"
_PACKAGE: Final = "accel-state"
_BUILT_IN: Final = (
    ("torchrun", "torchrun:TorchrunEnvironment"),
    ("jobset", "kubernetes:JobSetEnvironment"),
    ("kubernetes", "kubernetes:TrainingJobEnvironment"),
    ("openmpi", "mpi:OpenMPIEnvironment"),
    ("mvapich", "mpi:MVAPICHEnvironment"),
    ("intel-mpi", "mpi:IntelMPIEnvironment"),
    ("slurm", "slurm:SlurmEnvironment"),
    ("lsf", "lsf:LSFEnvironment"),
    ("sagemaker", "sagemaker:SageMakerEnvironment"),
    ("pmi", "mpi:PMIEnvironment"),
)
"""The most specific first: Slurm and LSF start MPI, and several systems set the variables of PMI."""

CLUSTERS: Final[PluginGroup[type[ClusterEnvironment]]] = PluginGroup(
    _GROUP,
    "cluster environment",
    interface=Interface(subclass_of=ClusterEnvironment),
    own="last",
    built_in=tuple(Plugin(_GROUP, name, f"accel_state.clusters.{target}", _PACKAGE) for name, target in _BUILT_IN),
)
"""The systems whose variables are read."""


def cluster_environments(environ: Mapping[str, str], host: str = "") -> Iterator[ClusterEnvironment]:
    """An object for each system, in the order in which they are asked; broken plugins are left out.

    Args:
        environ: variables to read.
        host: name of this machine, which some systems list.
    """
    order = [name for name, _ in _BUILT_IN]
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
    found = (cluster.machines() for cluster in cluster_environments(environ, host))
    return next((machines for machines in found if machines is not None), Machines())
