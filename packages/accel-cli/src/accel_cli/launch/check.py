"""Checks a launch before any process is started; an error for a contradiction names both settings."""

from __future__ import annotations

from typing import Final

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.launch.backends import check_requirements, check_selection, given_sizes
from accel_cli.launch.settings import TorchrunSettings, fewest_machines
from accel_state.clusters import Machines
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

_PYTHON_CAN_DO: Final = "Remove one of them."


def shown(effect: ResolvedSetting) -> str:
    """A setting with its value and origin, in the form used in messages."""
    return f"{effect.setting.name}={effect.value} ({effect.origin})"


def contradiction(
    one: ResolvedSetting, other: ResolvedSetting, obstacle: str, remedy: str = _PYTHON_CAN_DO
) -> Conflict:
    """The error for two settings that contradict each other."""
    return Conflict(f"Cannot combine {shown(one)} and {shown(other)}.", obstacle, remedy)


def asks_for_torchrun(resolved: ResolvedSettings) -> ResolvedSetting | None:
    """The setting that requires torch.distributed.run to start the processes, or None."""
    if resolved["num_machines"].value > 1:
        return resolved["num_machines"]
    own = {"max_restarts"} if resolved["restart_policy"].value == "auto" else set()
    asking = (resolved[name] for name in settings_of(TorchrunSettings) if name not in own)
    return next((effect for effect in asking if effect.value != effect.setting.default), None)


_MOST_PROCESSES: Final = 4096
"""A larger number is a typing error, and starting so many processes would make the machine unusable."""


def check_launch(resolved: ResolvedSettings) -> None:
    """Check that the settings do not contradict each other and can be used.

    Raises:
        SettingError: a setting cannot be used; `Conflict` when two contradict each other.
    """
    check_selection(resolved)
    _check_machines(resolved)
    _check_devices(resolved)


def check_elastic(resolved: ResolvedSettings, launcher: str, elastic: bool) -> None:
    """Check that the launcher supports a range of machines, if one is given.

    Args:
        resolved: every setting of the launch.
        launcher: name of the launcher.
        elastic: whether the launcher supports a range.

    Raises:
        Conflict: a range is given, and the launcher does not support it.
    """
    machines = resolved["num_machines"]
    if not elastic and fewest_machines(machines.value) < machines.value:
        text = machines.setting.type.format(machines.value)
        raise Conflict(
            f"Cannot combine num_machines={text} ({machines.origin}) and the launcher {launcher!r}.",
            "The launcher does not support a range: it starts only when all machines are available.",
            f"Set --num_machines {int(machines.value)}, or use a launcher that supports a range, such as ray.",
        )


def check_own_launcher(resolved: ResolvedSettings) -> None:
    """Check for settings that neither the local launcher nor torch.distributed.run supports.

    Raises:
        SettingError: several machines without the address of the main machine.
        Conflict: the launcher does not support another setting.
    """
    _check_meeting(resolved)
    _check_launcher(resolved)


def check_here(resolved: ResolvedSettings, python: bool) -> None:
    """Check in advance what each process on this machine would check after its start.

    Args:
        resolved: every setting of the launch.
        python: whether the processes run this interpreter; other programs, and the machines of a TPU pod, have a
            separate installation.

    Raises:
        Missing: a package that the chosen backend requires is absent or too old.
        PluginError: the chosen backend could not be loaded.
    """
    pod = resolved.get("tpu_use_cluster")
    if python and not (pod is not None and pod.value):
        check_requirements(resolved)


def check_axes(resolved: ResolvedSettings, processes: int) -> None:
    """Check that the sizes of mesh axes fit the number of processes.

    Raises:
        Conflict: the sizes need another number of processes, or contradict each other.
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
        obstacle = f"With {machines.value} machine(s), the rank must be from 0 to {machines.value - 1}."
        raise contradiction(rank, machines, obstacle, "Correct --machine_rank or --num_machines.")
    if processes.value is not None and processes.value % machines.value:
        obstacle = (
            f"Every machine starts the same number of processes, and the total is not a multiple of {machines.value}."
        )
        raise contradiction(processes, machines, obstacle, f"Set --num_processes to a multiple of {machines.value}.")
    if processes.value is not None and processes.value // machines.value > _MOST_PROCESSES:
        raise SettingError(
            f"Cannot launch with {shown(processes)}.",
            f"A machine starts at most {_MOST_PROCESSES} processes.",
            "Set --num_processes to the number of devices.",
        )


def _check_meeting(resolved: ResolvedSettings) -> None:
    machines, address = resolved["num_machines"], resolved["main_process_ip"]
    if machines.value > 1 and address.value is None:
        raise SettingError(
            f"Cannot launch with {shown(machines)}.",
            "A run on several machines needs the address of the main machine, which is missing.",
            "Set --main_process_ip to the address of the machine with rank 0.",
        )


def _check_devices(resolved: ResolvedSettings) -> None:
    cpu, ids = resolved["cpu"], resolved["gpu_ids"]
    if cpu.value and ids.value not in (None, "all"):
        raise contradiction(cpu, ids, "A run on the CPU does not use other devices.")


def _check_launcher(resolved: ResolvedSettings) -> None:
    launcher, reason = resolved["launcher"], asks_for_torchrun(resolved)
    policy, budget = resolved["restart_policy"], resolved["max_restarts"]
    if policy.value == "auto" and (launcher.value == "torchrun" or reason is not None):
        obstacle = "torch.distributed.run has no restart policy: it only counts restarts."
        remedy = "Remove --restart_policy: with --max_restarts, it restarts after every failure."
        raise contradiction(policy, launcher if reason is None else reason, obstacle, remedy)
    if policy.value == "auto" and budget.value < 1:
        obstacle = "The restart policy needs at least one restart."
        raise contradiction(
            policy, budget, obstacle, "Set --max_restarts, for example to 20, or remove --restart_policy."
        )
    if launcher.value == "local" and reason is not None:
        obstacle = (
            "The local launcher starts processes on one machine, and restarts them only by --restart_policy auto."
        )
        raise contradiction(launcher, reason, obstacle, "Use --launcher torchrun, or remove --launcher.")
    prefix = resolved["prefix_output"]
    runs_torchrun = launcher.value == "torchrun" or reason is not None
    if prefix.value and runs_torchrun:
        other = launcher if reason is None else reason
        obstacle = "torch.distributed.run forwards the output itself, without this prefix."
        raise contradiction(prefix, other, obstacle)


def check_launchers(machines: Machines, processes: int) -> None:
    """Check that several launchers on one machine do not start several processes each.

    Raises:
        Conflict: a batch system started this launcher more than once here.
    """
    if machines.launchers > 1 and processes > 1:
        raise Conflict(
            f"Cannot start {processes} processes from each launcher.",
            f"{machines.system} started {machines.launchers} launchers on this machine.",
            "Start one launcher on each machine, as with srun --ntasks-per-node=1, or one process from each launcher.",
        )
