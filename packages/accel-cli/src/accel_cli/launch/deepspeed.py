"""Starts DeepSpeed's own launcher, which reaches several machines by pdsh, MPI or Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.launch.interface import LauncherManifest, LaunchPlan, Program
from accel_cli.launch.program import ProgramLauncher
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import Conflict, SettingError
from accel_state.network import DEFAULT_PORT
from accel_state.settings.schema import choice, setting

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("DEEPSPEED_LAUNCHERS", "ENVIRONMENT_FILE", "MANIFEST", "DeepSpeed", "DeepSpeedLaunchSettings")

DEEPSPEED_LAUNCHERS: Final = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
"""Ways to start processes on several machines; "standard" is torch.distributed.run on each machine."""

_STANDARD_LAUNCHER: Final = "standard"
_NOSSH_LAUNCHER: Final = "nossh"
_MPI_LAUNCHERS: Final = ("openmpi", "mvapich", "mpich")
"""Ways in which DeepSpeed always uses every slot of the hostfile."""

ENVIRONMENT_FILE: Final = "DS_ENV_FILE"
"""Variable for the path of the file with variables that DeepSpeed's launcher passes to the machines."""

_deepspeed: Final = partial(setting, flag="--{name}", key="deepspeed_config.{name}", group="DeepSpeed")


@dataclass
class DeepSpeedLaunchSettings:
    """Settings of DeepSpeed's own launcher."""

    deepspeed_hostfile: str | None = _deepspeed(help="Host file of DeepSpeed, which lists the machines.")
    deepspeed_exclusion_filter: str | None = _deepspeed(
        help="Machines and devices to exclude, such as host1@host2:0,2."
    )
    deepspeed_inclusion_filter: str | None = _deepspeed(help="Machines and devices to use, such as host1@host2:0,2.")
    deepspeed_multinode_launcher: str | None = _deepspeed(
        type=choice(*DEEPSPEED_LAUNCHERS), help="Way in which DeepSpeed starts processes on several machines."
    )


def _by_deepspeed(request: LaunchRequest) -> str | None:
    reason = _own_launcher(request.settings)
    chosen = request.selection is not None and "deepspeed" in request.selection.names
    return reason.text if chosen and reason is not None else None


def _own_launcher(settings: ResolvedSettings) -> ResolvedSetting | None:
    """The setting that makes DeepSpeed's launcher start the processes of a DeepSpeed run, or None."""
    chosen = settings["deepspeed_config.deepspeed_multinode_launcher"]
    if chosen.value is None:
        hostfile = settings["deepspeed_config.deepspeed_hostfile"]
        return hostfile if hostfile.value is not None else None
    return chosen if chosen.value != _STANDARD_LAUNCHER and settings["num_machines"].value > 1 else None


MANIFEST: Final = LauncherManifest(
    "deepspeed",
    "accel_cli.launch.deepspeed:DeepSpeed",
    "start the processes through DeepSpeed's own launcher, on the machines of a hostfile",
    "accel_cli.launch.deepspeed:DeepSpeedLaunchSettings",
    _by_deepspeed,
    priority=40,
    programs=(Program("deepspeed", "Install it with: pip install deepspeed"),),
)


class DeepSpeed(ProgramLauncher):
    """Starts processes on several machines through DeepSpeed's own launcher; see `Launcher`."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan one `deepspeed` command for all machines. DeepSpeed itself checks the filters.

        Raises:
            SettingError: the hostfile cannot be used, or is missing, or the address of the main machine is missing.
            Conflict: both filters are set, or the hostfile lists other machines or processes than the settings.
        """
        settings = request.settings
        own, machines = settings.instance(DeepSpeedLaunchSettings), settings.instance(MachineSettings)
        way = own.deepspeed_multinode_launcher or DEEPSPEED_LAUNCHERS[0]
        filters = {"include": own.deepspeed_inclusion_filter, "exclude": own.deepspeed_exclusion_filter}
        chosen = tuple(f"--{name}={value}" for name, value in filters.items() if value)
        _check(settings, way, chosen)
        total, processes = machines.num_processes, None
        counts = [f"--num_nodes={machines.num_machines}"] if settings["num_machines"].is_set else []
        if total is not None:
            processes = max(total // machines.num_machines, 1)
            counts.append(f"--num_gpus={processes}")
        argv = (
            "deepspeed",
            "--no_local_rank",
            f"--hostfile={own.deepspeed_hostfile}",
            *(
                ("--no_ssh", f"--node_rank={machines.machine_rank}")
                if way == _NOSSH_LAUNCHER
                else (f"--launcher={way}",)
            ),
            # A filter replaces the numbers of machines and devices.
            *(chosen or (() if way in _MPI_LAUNCHERS else counts)),
            *((f"--master_addr={machines.main_process_ip}",) if machines.main_process_ip else ()),
            f"--master_port={machines.main_process_port or DEFAULT_PORT}",
            *request.program,
        )
        return request.plan_of_program(argv, processes or 1)._replace(environment_file=ENVIRONMENT_FILE)


def _check(settings: ResolvedSettings, way: str, filters: tuple[str, ...]) -> None:
    """Check for settings that DeepSpeed's launcher does not support, or would misread."""
    from accel_cli.launch.mpi import read_hostfile

    failure = f"Cannot launch with deepspeed_multinode_launcher={way}."
    hostfile = settings["deepspeed_config.deepspeed_hostfile"]
    if len(filters) > 1:
        raise Conflict(
            "Cannot combine deepspeed_inclusion_filter and deepspeed_exclusion_filter.",
            "One selects the devices to use, the other the devices to exclude.",
            "Remove one of them.",
        )
    if hostfile.value is None:
        raise SettingError(
            failure,
            "There is no hostfile that lists the machines.",
            "Set --deepspeed_hostfile, or start each machine with --deepspeed_multinode_launcher standard.",
        )
    if way == _NOSSH_LAUNCHER and not settings["main_process_ip"].value:
        raise SettingError(
            failure,
            "Each machine starts its own processes, and needs the address of the main machine, which is missing.",
            "Set --main_process_ip and --machine_rank on each machine.",
        )
    hosts = read_hostfile(hostfile.value, hostfile.origin)
    unknown = [host.name for host in hosts if host.slots is None]
    if unknown:
        raise SettingError(
            f"Cannot read the hostfile {hostfile.value} ({hostfile.origin}).",
            f"It does not set the number of processes on {', '.join(unknown)}.",
            f"Write it as: {unknown[0]} slots=4",
        )
    if way in _MPI_LAUNCHERS and filters:
        obstacle = "DeepSpeed starts a process on every slot of the hostfile through MPI."
        raise Conflict(failure, obstacle, "Remove the filter, and the lines of other machines from the hostfile.")
    there = {"num_machines": len(hosts), "num_processes": sum(host.slots or 0 for host in hosts)}
    for name, count in there.items():
        setting = settings[name]
        exact = way in _MPI_LAUNCHERS and setting.is_set and setting.value != count
        if exact or (name == "num_machines" and setting.is_set and setting.value > count and not filters):
            every = "DeepSpeed starts a process on every slot of the hostfile through MPI, and " if exact else ""
            raise Conflict(
                f"Cannot combine {setting.text} and deepspeed_hostfile ({hostfile.origin}).",
                f"{every}{hostfile.value} lists {count} {'machine(s)' if name == 'num_machines' else 'slots'}.",
                "Correct one of them.",
            )
