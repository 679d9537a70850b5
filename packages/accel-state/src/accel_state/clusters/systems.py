"""The systems of this package: torchrun, Kubernetes, MPI, Slurm, LSF and SageMaker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from accel_state.clusters import ClusterEnvironment, Machines
from accel_state.settings.environ import Given

__all__ = (
    "IntelMPIEnvironment",
    "JobSetEnvironment",
    "LSFEnvironment",
    "MVAPICHEnvironment",
    "OpenMPIEnvironment",
    "PMIEnvironment",
    "SageMakerEnvironment",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "TrainingJobEnvironment",
    "first_host",
    "in_batch_script",
    "tasks_of_node",
)

_FIRST_PORT: Final = 15000
_PORT_COUNT: Final = 10000
"""Ports for the store of a job, below the range that operating systems assign to clients."""


class SlurmEnvironment(ClusterEnvironment):
    """Slurm; the script of a job, which Slurm starts once, is not a process of a run."""

    name = "Slurm"
    rank_names = ("SLURM_PROCID",)
    world_size_names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank_names = ("SLURM_LOCALID",)
    node_rank_names = ("SLURM_NODEID",)

    def started_process(self) -> bool:
        """Whether this is a task of a step."""
        in_step = self.first(self.rank_names) is not None and not in_batch_script(self.environ)
        return in_step and super().started_process()

    def local_world_size(self) -> int:
        """Number of tasks on this node, from the list of all nodes."""
        if self.first(self.local_world_size_names) is not None:
            return super().local_world_size()
        tasks = self.first(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"))
        node = self.environ.get("SLURM_NODEID", "0")
        count = tasks_of_node(self.environ[tasks], int(node)) if tasks and node.isdecimal() else None
        return super().local_world_size() if count is None else count

    def address(self) -> tuple[str | None, int | None]:
        """The first host of the step, and a port from the numbers of job and step."""
        hosts = self.first(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
        job, step = self.environ.get("SLURM_JOB_ID", ""), self.environ.get("SLURM_STEP_ID", "")
        number = int(step) if step.isdecimal() else 0
        port = _FIRST_PORT + (int(job) + number) % _PORT_COUNT if job.isdecimal() else None
        return (first_host(self.environ[hosts]) if hosts else None), port

    def machines(self) -> Machines | None:
        """The nodes of a step with one launcher on each; several on one are single processes of the run."""
        environ = self.environ
        if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_NODES" not in environ or in_batch_script(environ):
            return None
        nodes, node = self.machine_number("SLURM_STEP_NUM_NODES"), self.machine_number("SLURM_NODEID")
        launchers = tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), node.value) or 1
        if launchers > 1:
            return Machines(self.name, launchers=launchers)
        values = {"num_machines": nodes, "machine_rank": node}
        host, port = self.address()
        if nodes.value > 1 and host is not None and "SLURM_STEP_NODELIST" in environ:
            values["main_process_ip"] = Given(host, "$SLURM_STEP_NODELIST")
        if nodes.value > 1 and port is not None:
            values["main_process_port"] = Given(port, "$SLURM_JOB_ID")
        return Machines(self.name, values)


def in_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is the script of a job, which Slurm starts once, and not a step, which `srun` starts."""
    in_job = "SLURM_JOB_ID" in environ
    in_step = any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    return in_job and not in_step


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


class TorchrunEnvironment(ClusterEnvironment):
    """The variables of torchrun's processes, and those that torchrun reads in place of options."""

    name = "torchrun"
    rank_names = ("RANK",)
    world_size_names = ("WORLD_SIZE",)
    # The second of these, and the third of the next, are those of DeepSpeed's launcher.
    local_world_size_names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    node_rank_names = ("GROUP_RANK", "NODE_RANK", "CROSS_RANK")

    def machines(self) -> Machines | None:
        """The machines as the options of torchrun give them in variables; not a range."""
        environ = self.environ
        if not environ.get("PET_NNODES", "").isdecimal():
            return None
        values = {"num_machines": self.machine_number("PET_NNODES")}
        if "PET_NODE_RANK" in environ:
            values["machine_rank"] = self.machine_number("PET_NODE_RANK")
        if environ.get("PET_NPROC_PER_NODE", "").isdecimal():
            total = values["num_machines"].value * int(environ["PET_NPROC_PER_NODE"])
            values["num_processes"] = Given(total, "$PET_NPROC_PER_NODE")
        if "PET_MASTER_PORT" in environ:
            values["main_process_port"] = self.machine_number("PET_MASTER_PORT")
        if environ.get("PET_MASTER_ADDR"):
            values["main_process_ip"] = Given(environ["PET_MASTER_ADDR"], "$PET_MASTER_ADDR")
        return Machines(self.name, values)


class TrainingJobEnvironment(ClusterEnvironment):
    """A job of Kubeflow's training operator, which sets RANK and WORLD_SIZE as if each pod were one process."""

    name = "Kubernetes"

    def machines(self) -> Machines | None:
        """Each pod is a machine; a process of a launch has a local rank too."""
        needed = ("KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR")
        if any(name not in self.environ for name in needed) or "LOCAL_RANK" in self.environ:
            return None
        return Machines(
            self.name, {"num_machines": self.machine_number("WORLD_SIZE"), "machine_rank": self.machine_number("RANK")}
        )


class JobSetEnvironment(ClusterEnvironment):
    """A replicated job of a JobSet.

    An indexed Job sets JOB_COMPLETION_INDEX. JobSet sets no variable; the manifest passes labels of the pod on by the
    downward API: JOBSET_JOB_INDEX (jobset.sigs.k8s.io/job-index), JOBSET_REPLICAS (replicatedjob-replicas) and
    JOBSET_RESTART_ATTEMPT (restart-attempt). JOBSET_PODS is the number of pods of each job (its completions), and
    JOBSET_SUBDOMAIN that of its network; without it, the name of the JobSet (jobset-name) in JOBSET_NAME.
    """

    name = "JobSet"

    def machines(self) -> Machines | None:
        """Each pod is a machine; the first pod of the first job is the main one.

        Pods have the host name `<jobset>-<replicated job>-<job index>-<pod index>`, in the subdomain.
        """
        environ = self.environ
        if "JOBSET_JOB_INDEX" not in environ or "JOB_COMPLETION_INDEX" not in environ or "LOCAL_RANK" in environ:
            return None
        pods = self._number("JOBSET_PODS", 1)
        job, pod = self.machine_number("JOBSET_JOB_INDEX").value, self.machine_number("JOB_COMPLETION_INDEX").value
        values = {
            "num_machines": Given(self._number("JOBSET_REPLICAS", 1) * pods, "$JOBSET_REPLICAS"),
            "machine_rank": Given(job * pods + pod, "$JOB_COMPLETION_INDEX"),
        }
        own = re.fullmatch(r"(.+)-\d+-\d+", self.host.partition(".")[0])
        subdomain = environ.get("JOBSET_SUBDOMAIN") or environ.get("JOBSET_NAME")
        if own is not None and subdomain:
            values["main_process_ip"] = Given(f"{own[1]}-0-0.{subdomain}", "$JOBSET_SUBDOMAIN")
        return Machines(self.name, values, restarts=self._number("JOBSET_RESTART_ATTEMPT", 0))

    def _number(self, name: str, default: int) -> int:
        return int(self.machine_number(name).value) if self.environ.get(name) else default


class _MPI(ClusterEnvironment):
    """Processes that mpirun started; a subclass has the variables of one family of MPI."""

    launcher_names: ClassVar[tuple[str, str, str]]
    """Variables with rank, number and number on this machine of launchers that mpirun started."""

    def address(self) -> tuple[str | None, int | None]:
        """MPI sets no address: this machine, if all processes are on one node."""
        from accel_state.network import DEFAULT_PORT

        size, local = (self.first(names) for names in (self.world_size_names, self.local_world_size_names))
        one_node = self.environ.get(size or "") == self.environ.get(local or "")
        return ("127.0.0.1" if one_node else None), DEFAULT_PORT

    def machines(self) -> Machines | None:
        """One launcher on each machine; several on one are single processes of the run."""
        rank, size, local_size = self.launcher_names
        if any(name not in self.environ for name in self.launcher_names):
            return None
        launchers = self.machine_number(local_size).value
        if launchers > 1:
            return Machines("MPI", launchers=launchers)
        return Machines("MPI", {"num_machines": self.machine_number(size), "machine_rank": self.machine_number(rank)})


class OpenMPIEnvironment(_MPI):
    """Processes that Open MPI started."""

    name = "OpenMPI"
    rank_names = ("OMPI_COMM_WORLD_RANK",)
    world_size_names = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_world_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    launcher_names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class MVAPICHEnvironment(_MPI):
    """Processes that MVAPICH started."""

    name = "MVAPICH"
    rank_names = ("MV2_COMM_WORLD_RANK",)
    world_size_names = ("MV2_COMM_WORLD_SIZE",)
    local_rank_names = ("MV2_COMM_WORLD_LOCAL_RANK",)
    local_world_size_names = ("MV2_COMM_WORLD_LOCAL_SIZE",)
    launcher_names = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


class IntelMPIEnvironment(_MPI):
    """Processes that Intel MPI or MPICH started."""

    name = "Intel MPI"
    rank_names = ("PMI_RANK",)
    world_size_names = ("PMI_SIZE",)
    local_rank_names = ("MPI_LOCALRANKID",)
    local_world_size_names = ("MPI_LOCALNRANKS",)
    launcher_names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")

    def started_process(self) -> bool:
        """Whether the local rank is set too: Slurm and others set the other variables."""
        return super().started_process() and self.first(self.local_rank_names) is not None


class PMIEnvironment(_MPI):
    """Other systems that set a part of the variables of Intel MPI, without local ranks."""

    name = "PMI"
    rank_names = ("PMI_RANK",)
    world_size_names = ("PMI_SIZE",)

    def machines(self) -> Machines | None:
        """Nothing is known about machines."""
        return None


class LSFEnvironment(ClusterEnvironment):
    """A job of LSF, whose launchers `blaunch` starts; one variable lists its hosts."""

    name = "LSF"

    def machines(self) -> Machines | None:
        """The hosts of the job, among which this machine is found by its name."""
        if "LSF_PM_TASKID" not in self.environ or "LSB_MCPU_HOSTS" not in self.environ:
            return None
        hosts = list(dict.fromkeys(self.environ["LSB_MCPU_HOSTS"].split()[::2]))
        short = [name.partition(".")[0] for name in hosts]
        host = self.host.partition(".")[0]
        if host not in short:
            return None
        values = {"num_machines": len(hosts), "machine_rank": short.index(host), "main_process_ip": hosts[0]}
        from_hosts = {name: Given(value, "$LSB_MCPU_HOSTS") for name, value in values.items()}
        return Machines(self.name, from_hosts if len(hosts) > 1 else {})


class SageMakerEnvironment(ClusterEnvironment):
    """A training job with one container on each instance; a variable lists the containers as JSON."""

    name = "SageMaker"

    def machines(self) -> Machines | None:
        """The containers of the job."""
        if "SM_HOSTS" not in self.environ:
            return None
        import json

        try:
            hosts = sorted(json.loads(self.environ["SM_HOSTS"]))
            rank = hosts.index(self.environ.get("SM_CURRENT_HOST", ""))
        except (ValueError, TypeError):
            return None
        values = {
            "num_machines": Given(len(hosts), "$SM_HOSTS"),
            "machine_rank": Given(rank, "$SM_CURRENT_HOST"),
            "main_process_ip": Given(hosts[0], "$SM_HOSTS"),
        }
        return Machines(self.name, values if len(hosts) > 1 else {})
