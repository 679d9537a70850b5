"""Starting processes on several machines through DeepSpeed's own launcher, which reaches them by pdsh, MPI or Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from accel_cli.config.effective import Effective
from accel_cli.engines.deepspeed import LAUNCHERS, DeepSpeedLaunchSettings
from accel_cli.launch.arguments import MachineSettings
from accel_cli.launch.hostfile import read_hostfile
from accel_cli.launch.torchrun import PORT_OF_MACHINES
from accel_state.errors import Conflict, SettingError

__all__ = ("ENVIRONMENT_FILE", "check_deepspeed", "deepspeed_argv", "environment_lines", "own_launcher")

ENVIRONMENT_FILE: Final = "DS_ENV_FILE"
"""Variable that names the file with the variables which DeepSpeed's launcher hands to the machines."""

_BY_MACHINE: Final = "standard"
_PLAIN: Final = re.compile(r"[^;\n<> \t]+")


def own_launcher(effective: Effective) -> bool:
    """Whether DeepSpeed's launcher starts the processes, and not this one on each machine."""
    settings = effective.instance(DeepSpeedLaunchSettings)
    chosen = settings.deepspeed_multinode_launcher
    if chosen is None:
        return settings.deepspeed_hostfile is not None
    return chosen != _BY_MACHINE and effective["num_machines"].value > 1


def check_deepspeed(effective: Effective) -> None:
    """Refuse what DeepSpeed's launcher cannot do.

    Raises:
        SettingError: the hostfile cannot be used, or is missing.
        Conflict: machines are both left out and chosen, or the hostfile has another number of them.
    """
    settings = effective.instance(DeepSpeedLaunchSettings)
    machines = effective["num_machines"]
    if settings.deepspeed_inclusion_filter and settings.deepspeed_exclusion_filter:
        raise Conflict(
            "deepspeed_inclusion_filter and deepspeed_exclusion_filter were both asked for.",
            "One names the devices to use, the other those to leave out.",
            "Remove one of the two.",
        )
    chosen = settings.deepspeed_multinode_launcher or LAUNCHERS[0]
    if settings.deepspeed_hostfile is None:
        if chosen in ("nossh", "slurm"):
            return
        raise SettingError(
            f"deepspeed_multinode_launcher={chosen} was asked for.",
            "No hostfile names the machines.",
            "Give --deepspeed_hostfile, or --deepspeed_multinode_launcher standard to start each machine by itself.",
        )
    effect = effective["deepspeed_config.deepspeed_hostfile"]
    hosts = read_hostfile(settings.deepspeed_hostfile, effect.origin)
    filtered = settings.deepspeed_inclusion_filter or settings.deepspeed_exclusion_filter
    if machines.given and machines.value > len(hosts) and not filtered:
        raise Conflict(
            f"num_machines={machines.value} ({machines.origin}) and deepspeed_hostfile ({effect.origin}) were given.",
            f"{settings.deepspeed_hostfile} names {len(hosts)} machine(s).",
            "Correct one of the two.",
        )


def deepspeed_argv(effective: Effective, processes: int | None, program: Sequence[str]) -> tuple[str, ...]:
    """Command line of DeepSpeed's launcher for a program.

    Args:
        effective: every setting of the launch.
        processes: processes on each machine, or None for as many as the hostfile says.
        program: what each of them runs: a Python script and its arguments.
    """
    machines = effective.instance(MachineSettings)
    settings = effective.instance(DeepSpeedLaunchSettings)
    hosts = (f"--hostfile={settings.deepspeed_hostfile}",) if settings.deepspeed_hostfile else ()
    count = (f"--num_nodes={machines.num_machines}",) if effective["num_machines"].given else ()
    return (
        "deepspeed",
        "--no_local_rank",
        *hosts,
        f"--launcher={settings.deepspeed_multinode_launcher or LAUNCHERS[0]}",
        *(_chosen(settings) or (*count, *((f"--num_gpus={processes}",) if processes is not None else ()))),
        *((f"--master_addr={machines.main_process_ip}",) if machines.main_process_ip else ()),
        f"--master_port={machines.main_process_port or PORT_OF_MACHINES}",
        *program,
    )


def _chosen(settings: DeepSpeedLaunchSettings) -> tuple[str, ...]:
    """Machines and devices that were chosen, in place of their numbers."""
    if settings.deepspeed_exclusion_filter:
        return (f"--exclude={settings.deepspeed_exclusion_filter}",)
    if settings.deepspeed_inclusion_filter:
        return (f"--include={settings.deepspeed_inclusion_filter}",)
    return ()


def environment_lines(environment: Mapping[str, str]) -> Iterator[str]:
    """Lines of the file with variables; one that a shell would take apart is left out."""
    for name, value in sorted(environment.items()):
        if _PLAIN.fullmatch(name) and _PLAIN.fullmatch(value):
            yield f"{name}={value}{os.linesep}"
