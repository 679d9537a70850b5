"""Slurm: the tasks of a step, and one launcher on each node of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from accel_state.clusters.base import ClusterEnvironment, Machines
from accel_state.settings.environ import Given

__all__ = ("SlurmEnvironment", "first_host", "in_batch_script", "tasks_of_node")

_FIRST_PORT: Final = 15000
_PORTS: Final = 10000
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
        port = _FIRST_PORT + (int(job) + number) % _PORTS if job.isdecimal() else None
        return (first_host(self.environ[hosts]) if hosts else None), port

    def machines(self) -> Machines | None:
        """The nodes of a step with one launcher on each; several on one are single processes of the run."""
        environ = self.environ
        if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_NODES" not in environ or in_batch_script(environ):
            return None
        nodes, node = self.given("SLURM_STEP_NUM_NODES"), self.given("SLURM_NODEID")
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
