"""Starts DeepSpeed's own launcher, which reaches several machines by pdsh, MPI or Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.launch.backends import selection_of
from accel_cli.launch.check import shown
from accel_cli.launch.interface import LauncherManifest, LaunchPlan, LaunchRequest, Program, one_process
from accel_cli.launch.launchers import PlanningLauncher
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import Conflict, SettingError
from accel_state.network import DEFAULT_PORT
from accel_state.settings.schema import choice, setting

if TYPE_CHECKING:
    from accel_cli.launch.mpi import Host

__all__ = (
    "DEEPSPEED_LAUNCHERS",
    "ENVIRONMENT_FILE",
    "MANIFEST",
    "DeepSpeed",
    "DeepSpeedLaunchSettings",
    "check_deepspeed",
    "deepspeed_argv",
    "own_launcher",
)

DEEPSPEED_LAUNCHERS: Final = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
"""Ways to start processes on several machines; "standard" is torch.distributed.run on each machine."""


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


_BY_MACHINE: Final = "standard"
"""DeepSpeed's name for a launch by torch.distributed.run on each machine."""


def _by_deepspeed(settings: ResolvedSettings, environ: Mapping[str, str]) -> str | None:
    selection, reason = selection_of(settings), own_launcher(settings)
    return shown(reason) if selection is not None and "deepspeed" in selection.names and reason is not None else None


def own_launcher(settings: ResolvedSettings) -> ResolvedSetting | None:
    """The setting that makes DeepSpeed's launcher start the processes of a DeepSpeed run, or None."""
    chosen = settings["deepspeed_config.deepspeed_multinode_launcher"]
    if chosen.value is None:
        hostfile = settings["deepspeed_config.deepspeed_hostfile"]
        return hostfile if hostfile.value is not None else None
    return chosen if chosen.value != _BY_MACHINE and settings["num_machines"].value > 1 else None


MANIFEST: Final = LauncherManifest(
    "deepspeed",
    "accel_cli.launch.deepspeed:DeepSpeed",
    "start the processes through DeepSpeed's own launcher, on the machines of a hostfile",
    "accel_cli.launch.deepspeed:DeepSpeedLaunchSettings",
    _by_deepspeed,
    priority=40,
    programs=(Program("deepspeed", "Install it with: pip install deepspeed"),),
)

ENVIRONMENT_FILE: Final = "DS_ENV_FILE"
"""Variable for the path of the file with variables that DeepSpeed's launcher passes to the machines."""

_WITHOUT_SSH: Final = "nossh"
_BY_MPI: Final = ("openmpi", "mvapich", "mpich")
"""Ways in which DeepSpeed always uses every slot of the hostfile."""


class DeepSpeed(PlanningLauncher):
    """Starts processes on several machines through DeepSpeed's own launcher; see `Launcher`."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan one `deepspeed` command for all machines."""
        check_deepspeed(request.settings)
        total, machines = request.settings["num_processes"].value, request.settings["num_machines"].value
        processes = None if total is None else max(total // machines, 1)
        argv = deepspeed_argv(request.settings, processes, request.program)
        return one_process(request, argv, "deepspeed", processes or 1)._replace(environment_file=ENVIRONMENT_FILE)


def check_deepspeed(resolved: ResolvedSettings) -> None:
    """Check for settings that DeepSpeed's launcher does not support.

    Raises:
        SettingError: the hostfile cannot be used, or is missing.
        Conflict: both filters are set, or the hostfile lists another number of machines.
    """
    settings = resolved.instance(DeepSpeedLaunchSettings)
    machines = resolved["num_machines"]
    if settings.deepspeed_inclusion_filter and settings.deepspeed_exclusion_filter:
        raise Conflict(
            "Cannot combine deepspeed_inclusion_filter and deepspeed_exclusion_filter.",
            "One selects the devices to use, the other the devices to exclude.",
            "Remove one of them.",
        )
    chosen = settings.deepspeed_multinode_launcher or DEEPSPEED_LAUNCHERS[0]
    if settings.deepspeed_hostfile is None:
        raise SettingError(
            f"Cannot launch with deepspeed_multinode_launcher={chosen}.",
            "There is no hostfile that lists the machines.",
            "Set --deepspeed_hostfile, or start each machine with --deepspeed_multinode_launcher standard.",
        )
    if chosen == _WITHOUT_SSH and not resolved["main_process_ip"].value:
        raise SettingError(
            f"Cannot launch with deepspeed_multinode_launcher={chosen}.",
            "Each machine starts its own processes, and needs the address of the main machine, which is missing.",
            "Set --main_process_ip and --machine_rank on each machine.",
        )
    from accel_cli.launch.mpi import read_hostfile

    effect = resolved["deepspeed_config.deepspeed_hostfile"]
    hosts = read_hostfile(settings.deepspeed_hostfile, effect.origin)
    _check_hosts(hosts, settings, effect.origin)
    if chosen in _BY_MPI:
        _check_all_taken(resolved, hosts, settings)
    filtered = settings.deepspeed_inclusion_filter or settings.deepspeed_exclusion_filter
    if machines.given and machines.value > len(hosts) and not filtered:
        raise Conflict(
            f"Cannot use num_machines={machines.value} ({machines.origin}) with deepspeed_hostfile ({effect.origin}).",
            f"{settings.deepspeed_hostfile} lists {len(hosts)} machine(s).",
            "Correct one of them.",
        )


def _check_hosts(hosts: Sequence[Host], settings: DeepSpeedLaunchSettings, origin: str) -> None:
    """Check that the hostfile sets every machine's number of processes, and that the filters match its machines."""
    unknown = [host.name for host in hosts if host.slots is None]
    if unknown:
        raise SettingError(
            f"Cannot read the hostfile {settings.deepspeed_hostfile} ({origin}).",
            f"It does not set the number of processes on {', '.join(unknown)}.",
            f"Write it as: {unknown[0]} slots=4",
        )
    slots = {host.name: host.slots or 0 for host in hosts}
    for name in ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"):
        text = getattr(settings, name)
        wrong = [part for part in (text or "").split("@") if text and not _fits(part, slots)]
        if wrong:
            raise SettingError(
                f"Cannot filter machines with {name}={text!r}.",
                f"{wrong[0]!r} is not a machine of {settings.deepspeed_hostfile}, or does not have these slots.",
                "Write it as host1@host2:0,2, with machines of the hostfile and their slots, counted from 0.",
            )


def _check_all_taken(resolved: ResolvedSettings, hosts: Sequence[Host], settings: DeepSpeedLaunchSettings) -> None:
    """Check that the launch uses all machines and processes of the hostfile."""
    asked = f"Cannot combine deepspeed_multinode_launcher={settings.deepspeed_multinode_launcher}"
    every = "DeepSpeed starts a process on every slot of the hostfile through MPI"
    if _chosen(settings):
        raise Conflict(
            f"{asked} and a filter of machines.",
            f"{every}.",
            "Remove the lines of other machines from the hostfile instead.",
        )
    there = {"num_machines": len(hosts), "num_processes": sum(host.slots or 0 for host in hosts)}
    for name, count in there.items():
        given = resolved[name]
        if given.given and given.value != count:
            raise Conflict(
                f"{asked} and {name}={given.value} ({given.origin}).",
                f"{every}, and {settings.deepspeed_hostfile} has {count}.",
                "Correct one of them.",
            )


def _fits(part: str, slots: Mapping[str, int]) -> bool:
    """Whether one machine of a filter, with its slots if it has some, is in the hostfile."""
    name, colon, chosen = part.strip().partition(":")
    numbers = chosen.split(",") if colon else ["0"]
    return name in slots and all(number.strip().isdecimal() and int(number) < slots[name] for number in numbers)


def deepspeed_argv(resolved: ResolvedSettings, processes: int | None, program: Sequence[str]) -> tuple[str, ...]:
    """Command line of DeepSpeed's launcher for a program.

    Args:
        resolved: every setting of the launch.
        processes: processes on each machine, or None for the numbers in the hostfile.
        program: the command of each process: a Python script and its arguments.
    """
    machines = resolved.instance(MachineSettings)
    settings = resolved.instance(DeepSpeedLaunchSettings)
    launcher = settings.deepspeed_multinode_launcher or DEEPSPEED_LAUNCHERS[0]
    counts: tuple[str, ...] = (f"--num_nodes={machines.num_machines}",) if resolved["num_machines"].given else ()
    counts += (f"--num_gpus={processes}",) if processes is not None else ()
    return (
        "deepspeed",
        "--no_local_rank",
        f"--hostfile={settings.deepspeed_hostfile}",
        *_way(launcher, machines.machine_rank),
        *(_chosen(settings) or (() if launcher in _BY_MPI else counts)),
        *((f"--master_addr={machines.main_process_ip}",) if machines.main_process_ip else ()),
        f"--master_port={machines.main_process_port or DEFAULT_PORT}",
        *program,
    )


def _way(launcher: str, rank: int) -> tuple[str, ...]:
    """Arguments for the connection to the machines; none if each machine starts its own processes."""
    return ("--no_ssh", f"--node_rank={rank}") if launcher == _WITHOUT_SSH else (f"--launcher={launcher}",)


def _chosen(settings: DeepSpeedLaunchSettings) -> tuple[str, ...]:
    """Arguments that select machines and devices; they replace the numbers of machines and devices."""
    if settings.deepspeed_exclusion_filter:
        return (f"--exclude={settings.deepspeed_exclusion_filter}",)
    if settings.deepspeed_inclusion_filter:
        return (f"--include={settings.deepspeed_inclusion_filter}",)
    return ()
