"""From settings to a plan: a pure function, so that tests compare what would be started as data.

Everything the plan depends on is handed in. Nothing is started and no port is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from accel_cli.config.resolved import ResolvedSettings
from accel_cli.launch.arguments import MachineSettings, SupervisionSettings
from accel_cli.launch.check import asks_for_torchrun, check_launch, check_own_launcher
from accel_cli.launch.deepspeed import ENVIRONMENT_FILE, check_deepspeed, deepspeed_argv, own_launcher
from accel_cli.launch.devices import usual_variables, visible
from accel_cli.launch.kinds import check_devices_of_kind, kind_of, kind_origins, kind_variables
from accel_cli.launch.mpi import mpi_argv, mpi_hosts
from accel_cli.launch.nested import PLACE_VARIABLES, WRITTEN, written
from accel_cli.launch.parts import RUNNER, LaunchPlan, Machine, Script
from accel_cli.launch.torchrun import torchrun_argv, torchrun_environment
from accel_cli.launch.tpu import pod_argv, tpu_argv, tpu_variables
from accel_state.devices.specs import SPECS
from accel_state.network import loopback_variables
from accel_state.settings.environ import ORIGINS, origins_text

__all__ = ("RUNNER", "Launch", "LaunchPlan", "Machine", "Script", "common_environment", "make_plan")

# torch's C++ side prints every frame of an error of the store; the traceback says the same in one line.
_USUAL: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


class Launch(NamedTuple):
    """What the ways to start processes are given.

    Args:
        resolved: every setting of the launch.
        script: what to run.
        machine: where to run it.
        carried: settings classes that the processes read back from their environment.
        backend: the backend that follows from the kind of run, or None.
    """

    resolved: ResolvedSettings
    script: Script
    machine: Machine
    carried: tuple[type, ...]
    backend: str | None

    @property
    def program(self) -> tuple[str, ...]:
        """What each process runs, after its interpreter."""
        return (RUNNER, self.script.how, self.script.target, *self.script.arguments)

    def environment(self, processes: int, **more: str) -> dict[str, str]:
        """Variables of the processes, of which `processes` run on each machine, and `more` of them."""
        environment = common_environment(self.resolved, self.carried)
        if self.backend is not None and not self.resolved["backend"].given:
            environment[str(self.resolved["backend"].setting.variable)] = self.backend
        environment.update(_machine_environment(self.resolved, self.machine, environment, processes))
        environment.update(more)
        origins = self._origins(environment)
        if origins:
            environment[ORIGINS] = origins_text(origins)
        environment[WRITTEN] = written(environment, self.machine.environ)
        return environment

    def _origins(self, environment: Mapping[str, str]) -> dict[tuple[str, str], str]:
        """What the user gave, by the variable that was derived from it and its text."""
        origins = kind_origins(self.resolved)
        found = kind_of(self.resolved)
        if found is not None:
            origins.setdefault(str(self.resolved["backend"].setting.variable), found[1].origin)
        for settings_class in self.carried:
            origins.update(self.resolved.origins(settings_class))
        return {
            (name, environment[name]): origin
            for name, origin in origins.items()
            if name in environment and origin != f"${name}"
        }


def make_plan(
    resolved: ResolvedSettings, script: Script, machine: Machine, carried: tuple[type, ...], backend: str | None = None
) -> LaunchPlan:
    """The plan that follows from the settings.

    Args:
        resolved: every setting of the launch.
        script: what to run.
        machine: where to run it.
        carried: settings classes that the processes read back from their environment.
        backend: the backend that owns the run, if the kind of run selects it.

    Raises:
        SettingError: a setting cannot be used here; `Conflict` when two contradict each other.
        NotOffered: the way to start the processes does not take what is to run.
    """
    check_launch(resolved)
    return _WAYS[_runner(resolved)](Launch(resolved, script, machine, carried, backend))


def _runner(resolved: ResolvedSettings) -> str:
    """Who starts the processes."""
    if resolved["mpirun_config.mpirun_hostfile"].value:
        return "mpirun"
    found = kind_of(resolved)
    wanted = found[0].runner if found is not None else ""
    if wanted and _TAKES_OVER[wanted](resolved):
        return wanted
    through_torchrun = resolved["launcher"].value == "torchrun" or asks_for_torchrun(resolved) is not None
    return "torchrun" if through_torchrun else "spawner"


def _spawner(launch: Launch) -> LaunchPlan:
    check_own_launcher(launch.resolved)
    machines = launch.resolved.instance(MachineSettings)
    supervision = launch.resolved.instance(SupervisionSettings)
    local = _local_processes(launch.resolved, machines, launch.machine)
    return LaunchPlan(
        launch.environment(local, **(loopback_variables(launch.machine.environ) if local > 1 else {})),
        (launch.machine.python, *launch.program),
        "spawner",
        processes=local,
        address=machines.main_process_ip or "127.0.0.1",
        port=machines.main_process_port or None,
        removed=PLACE_VARIABLES,
        grace_period=supervision.grace_period,
        prefix_output=supervision.prefix_output,
        hang_report_after=supervision.hang_report_after,
        hang_timeout=supervision.hang_timeout,
    )


def _torchrun(launch: Launch) -> LaunchPlan:
    check_own_launcher(launch.resolved)
    local = _local_processes(launch.resolved, launch.resolved.instance(MachineSettings), launch.machine)
    argv = (launch.machine.python, *torchrun_argv(launch.resolved, local, launch.program))
    grace = launch.resolved.instance(SupervisionSettings).grace_period
    inside = loopback_variables(launch.machine.environ) if launch.resolved["num_machines"].value == 1 else {}
    agent = torchrun_environment(launch.resolved, launch.machine.environ)
    agent.update(launch.resolved.variables(SupervisionSettings))
    environment = launch.environment(local, **agent, **inside)
    return LaunchPlan(environment, argv, "torchrun", local, grace_period=grace)


def _deepspeed(launch: Launch) -> LaunchPlan:
    check_deepspeed(launch.resolved)
    processes = _each(launch.resolved, launch.resolved["num_machines"].value)
    argv = deepspeed_argv(launch.resolved, processes, launch.program)
    return _one_process(launch, argv, "deepspeed", processes or 1)._replace(environment_file=ENVIRONMENT_FILE)


def _mpirun(launch: Launch) -> LaunchPlan:
    hosts = mpi_hosts(launch.resolved)
    processes = _each(launch.resolved, len(hosts)) or hosts[0].slots or 1
    program = (launch.machine.python, *launch.program)
    environment = launch.environment(processes)
    argv = mpi_argv(launch.resolved, processes, environment, program, launch.machine.mpi())
    return _one_process(launch, argv, "mpirun", processes)


def _tpu(launch: Launch) -> LaunchPlan:
    script = launch.script
    if launch.resolved["tpu_use_cluster"].value:
        how = {"script": (), "module": ("--module",), "program": ("--no_python",)}[script.how]
        argv = pod_argv(launch.resolved, (*how, script.target, *script.arguments))
    else:
        argv = tpu_argv(launch.resolved, script.how, script.target, script.arguments)
    plan = _one_process(launch, (launch.machine.python, *argv), "tpu", 1)
    return plan._replace(environment={**plan.environment, **tpu_variables(launch.resolved)})


def _one_process(launch: Launch, argv: tuple[str, ...], runner: str, processes: int) -> LaunchPlan:
    """A plan for a program that starts the processes by itself."""
    grace = launch.resolved.instance(SupervisionSettings).grace_period
    return LaunchPlan(launch.environment(processes), argv, runner, removed=PLACE_VARIABLES, grace_period=grace)


_WAYS: Final[Mapping[str, Callable[[Launch], LaunchPlan]]] = {
    "spawner": _spawner,
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "mpirun": _mpirun,
    "tpu": _tpu,
}

_TAKES_OVER: Final[Mapping[str, Callable[[ResolvedSettings], bool]]] = {
    "deepspeed": own_launcher,
    "tpu": lambda resolved: True,
}


def _each(resolved: ResolvedSettings, machines: int) -> int | None:
    """Processes on each of some machines, if the settings have their number."""
    total = resolved["num_processes"].value
    return None if total is None else max(total // machines, 1)


def _local_processes(resolved: ResolvedSettings, machines: MachineSettings, machine: Machine) -> int:
    """Processes to start on this machine."""
    found = kind_of(resolved)
    if machines.num_processes is not None:
        return machines.num_processes // machines.num_machines
    if resolved["cpu"].value or (found is not None and found[0].alone):
        return 1
    if machines.gpu_ids not in (None, "all"):
        return len([part for part in str(machines.gpu_ids).split(",") if part.strip()])
    count = machine.devices()
    check_devices_of_kind(resolved, count * machines.num_machines)
    return count


def common_environment(resolved: ResolvedSettings, carried: tuple[type, ...]) -> dict[str, str]:
    """Variables that carry the settings to the processes, wherever these run."""
    environment: dict[str, str] = {}
    for settings_class in carried:
        environment.update(resolved.variables(settings_class))
    return {**environment, **kind_variables(resolved)}


def _machine_environment(
    resolved: ResolvedSettings, machine: Machine, environment: Mapping[str, str], processes: int
) -> dict[str, str]:
    """Variables by which several processes share a machine."""
    machines = resolved.instance(MachineSettings)
    own: dict[str, str] = {}
    if machines.gpu_ids is not None:
        own.update(visible(machines.gpu_ids))
    if machines.num_cpu_threads_per_process is not None:
        own["OMP_NUM_THREADS"] = str(machines.num_cpu_threads_per_process)
    elif processes > 1:
        own["OMP_NUM_THREADS"] = str(max(machine.processors // processes, 1))
    shared = SPECS["cpu"].sharing if resolved["cpu"].value and processes > 1 else {}
    usual = {**_USUAL, **usual_variables(), **shared}
    free = {name: machine.environ.get(name, value) for name, value in usual.items() if name not in environment}
    return {**free, **own}
