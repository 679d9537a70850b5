"""Reads a launch in one direction; each step reads only the steps before it.

flags, config file, variables of the cluster     `read_request`
-> settings, each with its source                `accel_cli.config.resolved`
-> backend, launcher, values that are not meant  `decide`
-> contradictions                                `check_request`, `check_backend`
-> the plan of the launcher, for which the `LaunchRequest` answers questions, and `check_plan`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from accel_cli.config.file import ConfigFile, default_path, read_config
from accel_cli.config.resolved import Ignored, ResolvedSetting, ResolvedSettings, label, resolve_settings
from accel_cli.launch.backends import Selection, backends, select, switch_of_axes, switches, tables_of_switches
from accel_cli.launch.interface import AUTO, LauncherManifest, LaunchPlan, LaunchRequest, Machine
from accel_cli.launch.launchers import LOCAL, TORCHRUN, find_launcher, launch_classes, launchers
from accel_cli.launch.options import add_launch_arguments, flag_values, launch_options
from accel_cli.launch.outer_launch import without_outer
from accel_cli.launch.script import script_of
from accel_cli.launch.settings import fewest_machines
from accel_plugins.resolve import BACKENDS
from accel_plugins.separate import install_remedy, package_of
from accel_state.clusters import machines_of
from accel_state.errors import AccelError, Conflict, Missing, PluginError, SettingError
from accel_state.mesh import ParallelismConfig
from accel_state.settings.schema import settings_of

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = (
    "check_backend",
    "check_plan",
    "check_request",
    "decide",
    "idle_options",
    "is_shared",
    "read_request",
    "request_of",
)

_FP8: Final = ("fp8_config", "fp8")
"""The table of settings that only this precision reads."""

_SHARED_VARIABLES: Final = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",)
"""Variables of engines that runs without the engine read too."""


_MAX_PROCESSES_PER_MACHINE: Final = 4096
"""A larger number on one machine is a typing error, and starting so many processes would make it unusable."""


def read_request(arguments: Namespace, environ: Mapping[str, str], *, allocations: bool = True) -> LaunchRequest:
    """The request of a parsed command line, with the variables and the config file.

    Args:
        arguments: the command line, as `options.add_launch_arguments` declares it.
        environ: the variables of this process.
        allocations: whether an allocation of a batch system selects a launcher.

    Raises:
        SettingError: a setting cannot parse its value, the config file is not valid, or the launcher is not installed.
        Missing: no installed backend supports the config file's `distributed_type`.
    """
    own, classes = without_outer(environ), launch_classes()
    config = _config(arguments.config_file, own, classes)
    cluster = machines_of(own)
    flags = flag_values(arguments, classes)
    settings = resolve_settings(classes, flags, own, config.values if config else {}, cluster.values)
    request = LaunchRequest(
        settings,
        script_of(arguments),
        _machine_of(own),
        LOCAL,
        cluster=cluster,
        config=config,
        options=launch_options(arguments),
        quiet=bool(arguments.quiet),
        allocations=allocations,
    )
    return decide(request)


def request_of(words: Sequence[str], environ: Mapping[str, str], config_file: str | None = None) -> LaunchRequest:
    """The request of `accel launch` with these arguments; `config_file` replaces the config file of the arguments.

    Raises:
        SettingError: as for `read_request`.
    """
    from accel_cli.parser import Parser

    parser = Parser("accel launch")
    add_launch_arguments(parser)
    parsed = parser.parse_args(list(words))
    if config_file is not None:
        parsed.config_file = config_file
    return read_request(parsed, environ)


def decide(request: LaunchRequest) -> LaunchRequest:
    """The request with what its settings select, and without the values that cannot be meant for this run.

    Raises:
        SettingError: the backend or the launcher is not installed, or a value of the config file cannot be parsed.
        Missing: no installed backend has the selected `distributed_type`.
    """
    settings = request.settings
    backend = settings["backend"]
    if backend.value is not None:
        BACKENDS.find(backend.value, f"Cannot use the backend {backend.value!r} ({backend.origin}).")
    selection = select(settings)
    implied = None if backend.value is not None or selection is None else _implied_backend(selection)
    request = replace(request, selection=selection, backend=implied)
    launcher, reason = _choose_launcher(request)
    request = replace(request, launcher=launcher, launcher_reason=reason)
    if request.config is not None and request.config.refused:
        idle = idle_options(request)
        for name, error in request.config.refused.items():
            if name not in idle and not settings[name].is_set:
                raise error
    ignored = tuple(_not_meant(request))
    return replace(request, settings=settings.without(ignored), ignored=ignored)


def _machine_of(environ: Mapping[str, str]) -> Machine:
    """The facts about this machine that a plan needs."""
    from accel_cli.launch.devices import count_devices

    usable = getattr(os, "sched_getaffinity", None)
    processors = len(usable(0)) if usable is not None else os.cpu_count() or 1
    return Machine(sys.executable, processors, count_devices, environ)


def _config(path: str | None, environ: Mapping[str, str], classes: tuple[type, ...]) -> ConfigFile | None:
    if path is not None:
        return read_config(path, classes)
    usual = default_path(environ)
    return read_config(usual, classes) if os.path.isfile(usual) else None


def _implied_backend(selection: Selection) -> str | None:
    """Name of the backend; None if the devices imply it, or if it is one of several versions of an engine."""
    if selection.by_device:
        return None
    if selection.manifests:
        return selection.manifests[0].name if len(selection.manifests) == 1 else None
    package = package_of(selection.label)
    raise Missing(
        f"Cannot start a run with distributed_type {selection.label} ({selection.source.origin}).",
        "No installed backend supports it.",
        "Install a package that provides one (`accel backends` lists what is installed), or remove the option."
        if package is None
        else install_remedy(package),
    )


def _choose_launcher(request: LaunchRequest) -> tuple[LauncherManifest, str]:
    """The launcher that the settings name, else the one with the highest priority that has a reason to be used."""
    named = request.settings["launcher"]
    if named.value != AUTO:
        return find_launcher(named.value, named.origin), named.text
    reasons = []
    for launcher in launchers():
        manifest = None if launcher.failure else launcher.value
        if manifest is None or manifest.called_for is None:
            continue
        try:
            reason = manifest.called_for(request)
        except Exception as error:
            remedy = f"{launcher.remedy} Until then, select one with --launcher."
            obstacle = f"That of {launcher.origin} for {launcher.name!r} raised {error!r}."
            raise PluginError("Cannot ask the launchers whether they are meant.", obstacle, remedy) from error
        if reason is not None:
            reasons.append((manifest, reason))
    if not reasons:
        raise PluginError("Cannot select a launcher.", "No launcher is installed.", "Reinstall accel-cli.")
    return max(reasons, key=lambda one: one[0].priority)


def _addresses_of_others(settings: ResolvedSettings) -> Iterator[Ignored]:
    """Addresses at which the processes of one machine cannot meet, and the ports that belong to them."""
    from accel_cli.launch.addresses import is_own_address

    address, port = settings["main_process_ip"], settings["main_process_port"]
    alone = "the run is on this machine alone"
    for candidate in address.candidates[:-1]:
        if is_own_address(candidate.value):
            continue
        yield Ignored("main_process_ip", candidate, f"{alone}, and this is not its address")
        if candidate.origin == f"${address.definition.variable}":
            others = (one for one in port.candidates if one.origin == f"${port.definition.variable}")
            reason = f"{alone}, and {candidate.origin} is of another run"
            yield from (Ignored("main_process_port", one, reason) for one in others)


def is_shared(setting: ResolvedSetting) -> bool:
    """Whether a setting of an engine passes its value on in a variable that runs without the engine read too."""
    return setting.definition.variable in _SHARED_VARIABLES


def _contradiction(
    one: ResolvedSetting, other: ResolvedSetting, obstacle: str, remedy: str = "Remove one of them."
) -> Conflict:
    return Conflict(f"Cannot combine {one.text} and {other.text}.", obstacle, remedy)


def idle_options(request: LaunchRequest) -> dict[str, str]:
    """For each setting that this run does not read: the option with which a run would read it."""
    tables = _idle_tables(request)
    of_launchers = {
        label(setting): f"--launcher {launcher.name}"
        for launcher in launchers()
        if launcher.settings is not None and launcher.name != request.launcher.name
        for setting in settings_of(launcher.settings).values()
    }
    of_engines = {name: tables[table] for name in request.settings if (table := name.partition(".")[0]) in tables}
    return {**of_launchers, **of_engines}


def _idle_tables(request: LaunchRequest) -> dict[str, str]:
    """For each table of settings that this run does not read: the option with which a run would read it."""
    names = {request.settings["backend"].value, *(request.selection.names if request.selection is not None else ())}
    chosen = {name for name, users in switches().items() if not names.isdisjoint(one.name for one in users)}
    if request.axes:
        chosen.add(switch_of_axes())
    idle = {table: f"--{switch}" for table, switch in tables_of_switches().items() if switch not in chosen}
    if request.settings["mixed_precision"].value != _FP8[1]:
        idle[_FP8[0]] = f"--mixed_precision {_FP8[1]}"
    return idle


def _not_meant(request: LaunchRequest) -> Iterator[Ignored]:
    """Values that cannot be meant for this run, such as those in a file that was written for another one."""
    settings, selection = request.settings, request.selection
    one_machine, processes = settings["num_machines"].value == 1, settings["num_processes"]
    if selection is not None and selection.alone and one_machine and processes.of_file and processes.value > 1:
        yield Ignored("num_processes", processes.candidates[0], f"{selection.source.text} is one process")
    tables = _idle_tables(request)
    for name, setting in settings.items():
        user = tables.get(name.partition(".")[0])
        if user is not None and setting.of_file and is_shared(setting):
            yield Ignored(name, setting.candidates[0], f"it needs {user}")
    if one_machine and request.launcher.one_machine:
        yield from _addresses_of_others(settings)


def check_request(request: LaunchRequest) -> None:
    """Check that the settings do not contradict each other.

    Raises:
        SettingError: a setting cannot be used; `Conflict` when two contradict each other.
    """
    _check_range(request)
    if request.launcher.elsewhere:
        return
    _check_selection(request)
    _check_machines(request)
    if request.launcher.one_machine:
        _check_launcher(request)


def _check_range(request: LaunchRequest) -> None:
    machines = request.settings["num_machines"]
    if not request.launcher.elastic and fewest_machines(machines.value) < machines.value:
        text = machines.definition.type.format(machines.value)
        raise Conflict(
            f"Cannot combine num_machines={text} ({machines.origin}) and the launcher {request.launcher.name!r}.",
            "The launcher does not support a range: it starts only when all machines are available.",
            f"Set --num_machines {int(machines.value)}, or use a launcher that supports a range, such as ray.",
        )


def check_backend(request: LaunchRequest) -> None:
    """Check that the backend can start here; if several support the request, one of them is enough.

    Raises:
        Missing: a package that the backend requires is absent or too old.
        PluginError: the backend could not be loaded.
    """
    pod = request.settings.get("tpu_use_cluster")
    if request.launcher.elsewhere or request.script.how == "program" or (pod is not None and pod.value):
        # The processes run in another installation of Python.
        return
    named = request.settings["backend"]
    names, origin = ({named.value}, named.origin)
    if named.value is None and request.selection is not None:
        names, origin = set(request.selection.names), request.selection.source.origin
    chosen = [backend for backend in backends() if backend.name in names]
    errors = [backend.error(f"Cannot start the backend {backend.name!r} ({origin}).") for backend in chosen]
    if errors and errors[0] is not None and None not in errors:
        raise errors[0] from chosen[0].cause


def _check_selection(request: LaunchRequest) -> None:
    selection, cpu, processes = request.selection, request.settings["cpu"], request.settings["num_processes"]
    ids = request.settings["gpu_ids"]
    if cpu.value and ids.value not in (None, "all"):
        raise _contradiction(cpu, ids, "A run on the CPU does not use other devices.")
    if selection is None or not selection.on_devices or not selection.by_switch:
        return
    source = selection.source
    # The variable selects the CPU for every run on a machine, including runs on several devices.
    if cpu.value and not (selection.by_device and cpu.origin.startswith("$")):
        raise _contradiction(source, cpu, "One selects accelerators, the other the CPU.")
    if selection.by_device and processes.value == 1 and processes.is_set:
        remedy = "Set --num_processes to 2 or more, or remove the switch."
        raise _contradiction(source, processes, "One process uses only one device.", remedy)


def _check_machines(request: LaunchRequest) -> None:
    machines, rank = request.settings["num_machines"], request.settings["machine_rank"]
    processes = request.settings["num_processes"]
    if rank.value >= machines.value:
        obstacle = f"With {machines.value} machine(s), the rank must be from 0 to {machines.value - 1}."
        raise _contradiction(rank, machines, obstacle, "Correct --machine_rank or --num_machines.")
    if processes.value is None:
        return
    if processes.value % machines.value:
        obstacle = "Every machine starts the same number of processes."
        remedy = f"Set --num_processes to a multiple of {machines.value}."
        raise _contradiction(processes, machines, obstacle, remedy)
    if processes.value // machines.value > _MAX_PROCESSES_PER_MACHINE:
        raise SettingError(
            f"Cannot launch with {processes.text}.",
            f"A machine starts at most {_MAX_PROCESSES_PER_MACHINE} processes.",
            "Set --num_processes to the number of devices.",
        )


def _check_launcher(request: LaunchRequest) -> None:
    """Check for settings that the launchers of this machine do not support."""
    settings, reason = request.settings, request.needs_torchrun
    launcher, machines, policy = settings["launcher"], settings["num_machines"], settings["restart_policy"]
    if machines.value > 1 and settings["main_process_ip"].value is None:
        raise SettingError(
            f"Cannot launch with {machines.text}.",
            "A run on several machines needs the address of the main machine, which is missing.",
            "Set --main_process_ip to the address of the machine with rank 0.",
        )
    torchrun = request.launcher.name == TORCHRUN.name
    if policy.value == "auto" and (torchrun or reason is not None):
        obstacle = "torch.distributed.run has no restart policy: it only counts restarts."
        remedy = "Remove --restart_policy: with --max_restarts, it restarts after every failure."
        raise _contradiction(policy, reason or launcher, obstacle, remedy)
    if policy.value == "auto" and settings["max_restarts"].value < 1:
        remedy = "Set --max_restarts, for example to 20, or remove --restart_policy."
        obstacle = "The restart policy needs at least one restart."
        raise _contradiction(policy, settings["max_restarts"], obstacle, remedy)
    if reason is not None and not torchrun:
        obstacle = "This launcher is for one machine, and restarts processes only by --restart_policy auto."
        raise _contradiction(launcher, reason, obstacle, "Use --launcher torchrun, or remove --launcher.")
    if settings["prefix_output"].value and torchrun:
        obstacle = "torch.distributed.run forwards the output itrequest, without this prefix."
        raise _contradiction(settings["prefix_output"], reason or launcher, obstacle)


def check_plan(request: LaunchRequest, plan: LaunchPlan) -> None:
    """Check what depends on the number of processes, and that the launcher's requirements are installed.

    Raises:
        Conflict: the sizes of mesh axes need another number of processes, or a batch system started this launcher
            more than once here.
        Missing: the launcher requires a package.
        NotFound: the launcher requires a program.
    """
    request.launcher.check_needs()
    if request.cluster.launchers > 1 and plan.processes > 1:
        raise Conflict(
            f"Cannot start {plan.processes} processes from each launcher.",
            f"{request.cluster.system} started {request.cluster.launchers} launchers on this machine.",
            "Start one launcher on each machine, as with srun --ntasks-per-node=1, or one process from each.",
        )
    axes, switch = request.axes, request.settings["use_parallelism_config"]
    if plan.world_size is None or not axes or (switch.is_set and not switch.value):
        return
    try:
        request.settings.instance(ParallelismConfig).check_world(plan.world_size)
    except AccelError as error:
        number = request.settings["num_processes"]
        names = " and ".join(setting.text for setting in (*axes, *((number,) if number.is_set else ())))
        obstacle = f"{error.failure} {error.obstacle}"
        raise Conflict(f"Cannot launch with {names}.", obstacle, error.remedy) from error
