"""What cannot be launched, found before anything is started: contradictions are errors that name both sides."""

from __future__ import annotations

from typing import Final

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.launch.cluster_environment import ClusterEnvironment
from accel_cli.launch.kinds import check_kind, check_requirements, given_sizes
from accel_cli.launch.settings import TorchrunSettings, fewest_machines
from accel_state.errors import AccelError, Conflict, SettingError
from accel_state.mesh import ParallelismConfig
from accel_state.settings.schema import settings_of

__all__ = (
    "asks_for_torchrun",
    "check_axes",
    "check_elastic",
    "check_here",
    "check_launch",
    "check_launchers",
    "check_own_launcher",
    "contradiction",
    "shown",
)

_PYTHON_CAN_DO: Final = "Remove one of the two."


def shown(effect: ResolvedSetting) -> str:
    """A setting with its value and origin, as messages show it."""
    return f"{effect.setting.name}={effect.value} ({effect.origin})"


def contradiction(
    one: ResolvedSetting, other: ResolvedSetting, obstacle: str, remedy: str = _PYTHON_CAN_DO
) -> Conflict:
    """The error for two settings that do not go together."""
    return Conflict(f"Cannot combine {shown(one)} and {shown(other)}.", obstacle, remedy)


def asks_for_torchrun(resolved: ResolvedSettings) -> ResolvedSetting | None:
    """The setting because of which torch.distributed.run has to start the processes, if there is one."""
    if resolved["num_machines"].value > 1:
        return resolved["num_machines"]
    own = {"max_restarts"} if resolved["restart_policy"].value == "auto" else set()
    asking = (resolved[name] for name in settings_of(TorchrunSettings) if name not in own)
    return next((effect for effect in asking if effect.value != effect.setting.default), None)


_MOST_PROCESSES: Final = 4096
"""More are a slip of the finger, and a machine that starts them all can no longer be used."""


def check_launch(resolved: ResolvedSettings) -> None:
    """Refuse what contradicts itself or cannot be done.

    Raises:
        SettingError: a setting cannot be used; `Conflict` when two contradict each other.
    """
    check_kind(resolved)
    _check_machines(resolved)
    _check_devices(resolved)


def check_elastic(resolved: ResolvedSettings, launcher: str, elastic: bool) -> None:
    """Refuse a range of machines where the launcher starts on all of them or not at all.

    Args:
        resolved: every setting of the launch.
        launcher: name of the launcher.
        elastic: whether it takes a range.

    Raises:
        Conflict: a range was given, and it does not.
    """
    machines = resolved["num_machines"]
    if not elastic and fewest_machines(machines.value) < machines.value:
        text = machines.setting.type.format(machines.value)
        raise Conflict(
            f"Cannot combine num_machines={text} ({machines.origin}) and the launcher {launcher!r}.",
            "The launcher needs all machines and does not start with fewer.",
            f"Give --num_machines {int(machines.value)}, or an elastic launcher such as ray.",
        )


def check_own_launcher(resolved: ResolvedSettings) -> None:
    """Refuse what neither the local launcher nor torch.distributed.run can do.

    Raises:
        SettingError: several machines without the address of the main machine.
        Conflict: the launcher does not support another setting.
    """
    _check_meeting(resolved)
    _check_launcher(resolved)


def check_here(resolved: ResolvedSettings, python: bool) -> None:
    """Refuse what the processes of this machine would refuse, each of them, once they have started.

    Args:
        resolved: every setting of the launch.
        python: whether the processes run this interpreter; a program of another kind has an installation of its own,
            as the machines of a TPU pod have.

    Raises:
        Missing: a package that the chosen backend requires is absent or too old.
        PluginError: the chosen backend could not be loaded.
    """
    pod = resolved.get("tpu_use_cluster")
    if python and not (pod is not None and pod.value):
        check_requirements(resolved)


def check_axes(resolved: ResolvedSettings, processes: int) -> None:
    """Refuse sizes of axes that a number of processes does not fit.

    Raises:
        Conflict: the sizes take another number, or contradict each other.
    """
    sizes, switch = given_sizes(resolved), resolved["use_parallelism_config"]
    if not sizes or (switch.given and not switch.value):
        return
    try:
        resolved.instance(ParallelismConfig).check_world(processes)
    except AccelError as error:
        number = resolved["num_processes"]
        asked = [shown(effect) for effect in (*sizes, *((number,) if number.given else ()))]
        obstacle = f"{error.failure} {error.obstacle}"
        raise Conflict(f"Cannot launch with {' and '.join(asked)}.", obstacle, error.remedy) from error


def _check_machines(resolved: ResolvedSettings) -> None:
    machines, rank = resolved["num_machines"], resolved["machine_rank"]
    processes = resolved["num_processes"]
    if rank.value >= machines.value:
        obstacle = f"With {machines.value} machine(s) the ranks go from 0 to {machines.value - 1}."
        raise contradiction(rank, machines, obstacle, "Correct --machine_rank or --num_machines.")
    if processes.value is not None and processes.value % machines.value:
        obstacle = "Every machine starts the same number of processes, so the total has to be a multiple."
        raise contradiction(processes, machines, obstacle, f"Give a multiple of {machines.value} as --num_processes.")
    if processes.value is not None and processes.value // machines.value > _MOST_PROCESSES:
        raise SettingError(
            f"Cannot launch with {shown(processes)}.",
            f"A machine starts at most {_MOST_PROCESSES} processes.",
            "Give one process for each device as --num_processes.",
        )


def _check_meeting(resolved: ResolvedSettings) -> None:
    machines, address = resolved["num_machines"], resolved["main_process_ip"]
    if machines.value > 1 and address.value is None:
        raise SettingError(
            f"Cannot launch with {shown(machines)}.",
            "The address of the main machine, where the machines meet, is missing.",
            "Give --main_process_ip, the address of the machine with rank 0.",
        )


def _check_devices(resolved: ResolvedSettings) -> None:
    cpu, ids = resolved["cpu"], resolved["gpu_ids"]
    if cpu.value and ids.value not in (None, "all"):
        raise contradiction(cpu, ids, "A run on the CPU uses no other devices.")


def _check_launcher(resolved: ResolvedSettings) -> None:
    launcher, reason = resolved["launcher"], asks_for_torchrun(resolved)
    policy, budget = resolved["restart_policy"], resolved["max_restarts"]
    if policy.value == "auto" and (launcher.value == "torchrun" or reason is not None):
        obstacle = "torch.distributed.run only counts restarts and has no policy."
        remedy = "Leave --restart_policy out: --max_restarts alone lets it restart after every failure."
        raise contradiction(policy, launcher if reason is None else reason, obstacle, remedy)
    if policy.value == "auto" and budget.value < 1:
        obstacle = "max_restarts does not allow a single restart."
        raise contradiction(policy, budget, obstacle, "Give --max_restarts, for example 20, or leave the policy out.")
    if launcher.value == "local" and reason is not None:
        obstacle = "The local launcher starts processes on one machine and does not restart them."
        raise contradiction(launcher, reason, obstacle, "Give --launcher torchrun, or leave it out.")
    prefix = resolved["prefix_output"]
    runs_torchrun = launcher.value == "torchrun" or reason is not None
    if prefix.value and runs_torchrun:
        other = launcher if reason is None else reason
        obstacle = "torch.distributed.run forwards the output itself and has no such prefix."
        raise contradiction(prefix, other, obstacle)


def check_launchers(cluster: ClusterEnvironment, processes: int) -> None:
    """Refuse to start several processes from each of several launchers on one machine.

    Raises:
        Conflict: a batch system started this launcher more than once here.
    """
    if cluster.launchers > 1 and processes > 1:
        raise Conflict(
            f"Cannot start {processes} processes with each launcher.",
            f"{cluster.system} started {cluster.launchers} launchers on this machine.",
            "Start one launcher on each machine, as with srun --ntasks-per-node=1, or one process with each launcher.",
        )
