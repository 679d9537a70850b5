"""Reads the environment of a launch: variables of an outer launch, and of a batch system that describes the machines.

The variables of Slurm, MPI, LSF, Kubernetes and torchrun are read. If a batch system started one launcher on each
machine, its variables describe the run. If it started the launcher once, as in the script of a Slurm job, they describe
the resources of the job, and this module ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from accel_state.errors import SettingError
from accel_state.network import SECRET_VARIABLE
from accel_state.settings.environ import ORIGINS, Given
from accel_state.topology import derive_from_slurm, first_host, in_batch_script, tasks_of_node

__all__ = (
    "PLACE_VARIABLES",
    "SYSTEMS",
    "WRITTEN",
    "ClusterEnvironment",
    "read_cluster_environment",
    "without_outer",
    "written",
)

WRITTEN: Final = "ACCEL_LAUNCH_VARIABLES"
"""Variable that lists the variables which a launch has set."""

PLACE_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_ERROR_FILE",
)
"""Variables with which a launch describes each process's place, except for the address of the store."""

_KEPT: Final = "PYTHONPATH"
"""A variable to which a launch only adds, so that a launch inside it inherits it."""

_STORE_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT", SECRET_VARIABLE)
_TORCHRUN_TRACE: Final = "TORCHELASTIC_RUN_ID"
_TORCHRUN_PREFIXES: Final = ("TORCHELASTIC_", "ROLE_", "GROUP_")


def written(environment: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Value of `WRITTEN`: the variables that a launch adds or changes, without those that it passes on unchanged."""
    changed = [name for name, value in environment.items() if environ.get(name) != value and name != _KEPT]
    return ",".join(sorted({*changed, *PLACE_VARIABLES, *_STORE_VARIABLES}))


def without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of an outer launch by this launcher or by torch.distributed.run."""
    dropped = {WRITTEN, ORIGINS, *environ.get(WRITTEN, "").split(",")}
    if _TORCHRUN_TRACE in environ:
        dropped.update(PLACE_VARIABLES, _STORE_VARIABLES, _with_prefix(environ))
    return {name: value for name, value in environ.items() if name not in dropped}


def _with_prefix(environ: Iterable[str]) -> Iterable[str]:
    return (name for name in environ if name.startswith(_TORCHRUN_PREFIXES))


Variables = Mapping[str, str]


class ClusterEnvironment(NamedTuple):
    """The description of this machine by a batch system.

    Args:
        system: name of the batch system; empty without one.
        values: values of settings by name, each with the variable that defines it.
        launchers: number of launchers that the system started on this machine.
    """

    system: str = ""
    values: Mapping[str, Given] = MappingProxyType({})
    launchers: int = 1


def read_cluster_environment(environ: Variables, host: str) -> ClusterEnvironment:
    """The values of the first batch system whose variables are set.

    Args:
        environ: variables to read.
        host: name of this machine.

    Raises:
        SettingError: a variable that must be a number is not one.
    """
    for read in SYSTEMS:
        found = read(environ, host)
        if found is not None:
            return found
    return ClusterEnvironment()


def _torchrun(environ: Variables, host: str) -> ClusterEnvironment | None:
    """The variables that torchrun reads instead of options; Kubeflow's operator sets them."""
    if "PET_NNODES" not in environ or not environ["PET_NNODES"].isdecimal():
        return None
    values = {"num_machines": _number(environ, "PET_NNODES")}
    if "PET_NODE_RANK" in environ:
        values["machine_rank"] = _number(environ, "PET_NODE_RANK")
    if environ.get("PET_NPROC_PER_NODE", "").isdecimal():
        total = values["num_machines"].value * int(environ["PET_NPROC_PER_NODE"])
        values["num_processes"] = Given(total, "$PET_NPROC_PER_NODE")
    if "PET_MASTER_PORT" in environ:
        values["main_process_port"] = _number(environ, "PET_MASTER_PORT")
    values.update(_text(environ, main_process_ip="PET_MASTER_ADDR"))
    return ClusterEnvironment("torchrun", values)


def _kubernetes(environ: Variables, host: str) -> ClusterEnvironment | None:
    """A training job of Kubernetes, which sets RANK and WORLD_SIZE as if each pod were one process."""
    names = ("KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR")
    if any(name not in environ for name in names) or "LOCAL_RANK" in environ:
        return None
    values = {"num_machines": _number(environ, "WORLD_SIZE"), "machine_rank": _number(environ, "RANK")}
    return ClusterEnvironment("Kubernetes", values)


def _slurm(environ: Variables, host: str) -> ClusterEnvironment | None:
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_NODES" not in environ or in_batch_script(environ):
        return None
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    place = _number(environ, "SLURM_NODEID")
    launchers = tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), place.value) or 1
    if launchers > 1:
        return ClusterEnvironment("Slurm", launchers=launchers)
    derived = derive_from_slurm(environ)
    values = {"num_machines": nodes, "machine_rank": place}
    if nodes.value > 1 and "MASTER_ADDR" in derived:
        values["main_process_ip"] = Given(first_host(environ["SLURM_STEP_NODELIST"]), "$SLURM_STEP_NODELIST")
    if nodes.value > 1 and "MASTER_PORT" in derived:
        values["main_process_port"] = Given(int(derived["MASTER_PORT"]), "$SLURM_JOB_ID")
    return ClusterEnvironment("Slurm", values)


def _lsf(environ: Variables, host: str) -> ClusterEnvironment | None:
    """A job of LSF with launchers started by `blaunch`; one variable lists the hosts."""
    if "LSF_PM_TASKID" not in environ or "LSB_MCPU_HOSTS" not in environ:
        return None
    hosts = list(dict.fromkeys(environ["LSB_MCPU_HOSTS"].split()[::2]))
    short = [name.partition(".")[0] for name in hosts]
    if host.partition(".")[0] not in short:
        return None
    values = {
        "num_machines": Given(len(hosts), "$LSB_MCPU_HOSTS"),
        "machine_rank": Given(short.index(host.partition(".")[0]), "$LSB_MCPU_HOSTS"),
        "main_process_ip": Given(hosts[0], "$LSB_MCPU_HOSTS"),
    }
    return ClusterEnvironment("LSF", values if len(hosts) > 1 else {})


def _mpi(rank: str, size: str, local_size: str) -> Callable[[Variables, str], ClusterEnvironment | None]:
    def read(environ: Variables, host: str) -> ClusterEnvironment | None:
        if any(name not in environ for name in (rank, size, local_size)):
            return None
        launchers = _number(environ, local_size).value
        if launchers > 1:
            return ClusterEnvironment("MPI", launchers=launchers)
        return ClusterEnvironment(
            "MPI", {"num_machines": _number(environ, size), "machine_rank": _number(environ, rank)}
        )

    return read


def _number(environ: Variables, name: str) -> Given:
    if re.fullmatch(r"\s*\d+\s*", environ[name]) is None:
        raise SettingError(
            f"Cannot read the rank of this machine from {name}={environ[name]!r}.",
            "The value must be an integer of at least 0.",
            f"Unset {name}, or set --num_machines and --machine_rank.",
        )
    return Given(int(environ[name]), f"${name}")


def _text(environ: Variables, **names: str) -> dict[str, Given]:
    return {setting: Given(environ[name], f"${name}") for setting, name in names.items() if environ.get(name)}


SYSTEMS: Final = (
    _torchrun,
    _kubernetes,
    _slurm,
    _lsf,
    _mpi("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _mpi("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    _mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
"""The readers, the most specific first: Slurm may start a job through MPI, and MPI through Slurm."""
