"""What Slurm tells a process of a job step, beyond its rank: tasks of its node, and where the first node is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ("derive_from_slurm", "first_host", "in_batch_script", "tasks_of_node")

_FIRST_PORT: Final = 15000
_PORTS: Final = 10000
"""Ports for the processes to meet at; all below those that systems hand out to clients."""


def in_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is the script of a job, which Slurm starts once; its steps are what `srun` starts."""
    in_job = "SLURM_JOB_ID" in environ
    in_step = any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    return in_job and not in_step


def derive_from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of torchrun that Slurm's imply, as far as they do."""
    derived = {}
    tasks = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    node = environ.get("SLURM_NODEID", "0")
    mine = tasks_of_node(tasks, int(node)) if tasks and node.isdecimal() else None
    if mine is not None:
        derived["LOCAL_WORLD_SIZE"] = str(mine)
    hosts = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts:
        derived["MASTER_ADDR"] = first_host(hosts)
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdecimal():
        step = environ.get("SLURM_STEP_ID", "")
        derived["MASTER_PORT"] = str(_FIRST_PORT + (int(job) + int(step if step.isdecimal() else 0)) % _PORTS)
    return derived


def tasks_of_node(tasks: str, node: int) -> int | None:
    """Number of tasks on a node, from a list such as "2(x3),1"; None when the list does not reach so far.

    Example:
        >>> [tasks_of_node("2(x2),1", node) for node in range(4)]
        [2, 2, 1, None]
    """
    for part in tasks.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if found is None:
            return None
        nodes = int(found[2] or 1)
        if node < nodes:
            return int(found[1])
        node -= nodes
    return None


def first_host(hosts: str) -> str:
    """First host of Slurm's short form of a list.

    Example:
        >>> first_host("gpu[007-009,012],login1"), first_host("a,b")
        ('gpu007', 'a')
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts.strip())[0])


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name, "").strip()), None)
