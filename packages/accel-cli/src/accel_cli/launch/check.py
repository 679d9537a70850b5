"""What cannot be launched, found before anything is started: contradictions are errors that name both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from accel_cli.config.effective import Effect, Effective
from accel_cli.launch.arguments import TorchrunSettings
from accel_cli.launch.backends import check_requirements
from accel_cli.launch.cluster_environment import ClusterEnvironment
from accel_cli.launch.kinds import check_kind, given_sizes
from accel_state.errors import AccelError, Conflict, SettingError
from accel_state.mesh import ParallelismConfig
from accel_state.settings.schema import settings_of

__all__ = (
    "asks_for_torchrun",
    "check_axes",
    "check_here",
    "check_launch",
    "check_launchers",
    "check_own_launcher",
    "contradiction",
    "shown",
)

_PYTHON_CAN_DO: Final = "Remove one of the two."


def shown(effect: Effect) -> str:
    """A setting with its value and origin, as messages show it."""
    return f"{effect.setting.name}={effect.value} ({effect.origin})"


def contradiction(one: Effect, other: Effect, obstacle: str, remedy: str = _PYTHON_CAN_DO) -> Conflict:
    """The error for two settings that do not go together."""
    return Conflict(f"Cannot combine {shown(one)} and {shown(other)}.", obstacle, remedy)


def asks_for_torchrun(effective: Effective) -> Effect | None:
    """The setting because of which torch.distributed.run has to start the processes, if there is one."""
    if effective["num_machines"].value > 1:
        return effective["num_machines"]
    asking = (effective[name] for name in settings_of(TorchrunSettings))
    return next((effect for effect in asking if effect.value != effect.setting.default), None)


def check_launch(effective: Effective) -> None:
    """Refuse what contradicts itself or cannot be done.

    Raises:
        SettingError: a setting cannot be used; `Conflict` when two contradict each other.
    """
    check_kind(effective)
    _check_machines(effective)
    _check_devices(effective)


def check_own_launcher(effective: Effective) -> None:
    """Refuse what neither the spawner nor torch.distributed.run can do.

    Raises:
        SettingError: several machines without the address of the main machine.
        Conflict: the launcher does not support another setting.
    """
    _check_meeting(effective)
    _check_launcher(effective)


def check_here(effective: Effective, python: bool) -> None:
    """Refuse what the processes of this machine would refuse, each of them, once they have started.

    Args:
        effective: every setting of the launch.
        python: whether the processes run this interpreter; a program of another kind has an installation of its own,
            as the machines of a TPU pod have.

    Raises:
        Missing: a package that the chosen backend requires is absent or too old.
        PluginError: the chosen backend could not be loaded.
    """
    if python and not effective["tpu_use_cluster"].value:
        check_requirements(effective)


def check_axes(effective: Effective, processes: int) -> None:
    """Refuse sizes of axes that a number of processes does not fit.

    Raises:
        Conflict: the sizes take another number, or contradict each other.
    """
    sizes, switch = given_sizes(effective), effective["use_parallelism_config"]
    if not sizes or (switch.given and not switch.value):
        return
    try:
        effective.instance(ParallelismConfig).check_world(processes)
    except AccelError as error:
        number = effective["num_processes"]
        asked = [shown(effect) for effect in (*sizes, *((number,) if number.given else ()))]
        obstacle = f"{error.failure} {error.obstacle}"
        raise Conflict(f"{' and '.join(asked)} {_were(asked)} asked for.", obstacle, error.remedy) from error


def _were(asked: Sequence[str]) -> str:
    return "were" if len(asked) > 1 else "was"


def _check_machines(effective: Effective) -> None:
    machines, rank = effective["num_machines"], effective["machine_rank"]
    processes = effective["num_processes"]
    if rank.value >= machines.value:
        obstacle = f"With {machines.value} machine(s) the ranks go from 0 to {machines.value - 1}."
        raise contradiction(rank, machines, obstacle, "Correct --machine_rank or --num_machines.")
    if processes.value is not None and processes.value % machines.value:
        obstacle = "Every machine starts the same number of processes, so the total has to be a multiple."
        raise contradiction(processes, machines, obstacle, f"Give a multiple of {machines.value} as --num_processes.")


def _check_meeting(effective: Effective) -> None:
    machines, address = effective["num_machines"], effective["main_process_ip"]
    if machines.value > 1 and address.value is None:
        raise SettingError(
            f"Cannot launch with {shown(machines)}.",
            "The machines cannot find each other: the address of the main machine is missing.",
            "Give --main_process_ip, the address of the machine with rank 0.",
        )


def _check_devices(effective: Effective) -> None:
    cpu, ids = effective["cpu"], effective["gpu_ids"]
    if cpu.value and ids.value not in (None, "all"):
        raise contradiction(cpu, ids, "A run on the CPU uses no other devices.")


def _check_launcher(effective: Effective) -> None:
    launcher, reason = effective["launcher"], asks_for_torchrun(effective)
    if launcher.value == "spawner" and reason is not None:
        obstacle = "The spawner starts processes on one machine and does not restart them."
        raise contradiction(launcher, reason, obstacle, "Give --launcher torchrun, or leave it out.")
    prefix = effective["prefix_output"]
    runs_torchrun = launcher.value == "torchrun" or reason is not None
    if prefix.value and runs_torchrun:
        other = launcher if reason is None else reason
        obstacle = "torch.distributed.run passes the output on by itself and has no such prefix."
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
            "Start one launcher on each machine, as with srun --ntasks-per-node=1, or one process by each.",
        )
