"""What a launch tells the user before it starts: what it starts, and what the user may not have meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from accel_cli.command import spelled
from accel_cli.config.file import default_path
from accel_cli.launch.backends import SwitchSettings, backends
from accel_cli.launch.devices import count_device_files
from accel_cli.launch.interface import LaunchPlan, LaunchRequest
from accel_cli.launch.request import idle_options, is_shared
from accel_cli.launch.settings import MachineSettings
from accel_plugins.separate import package_of
from accel_state.settings.schema import settings_of

__all__ = ("first_line", "notes")

_MISSPELLING_SIMILARITY: Final = 0.9
"""Similarity from which a key counts as a misspelled one."""


def first_line(request: LaunchRequest, plan: LaunchPlan) -> str:
    """What a launch starts: processes, device, backend and precision."""
    settings = request.settings
    size, machines = plan.world_size, settings["num_machines"].value
    count = f"{size} process{'es' if size > 1 else ''}" if size else f"processes through {plan.launcher}"
    where = f" on {int(machines)} machines" if machines > 1 else ""
    device = "cpu" if settings["cpu"].value or _device_count(request) == 0 else "accelerator"
    backend = settings["backend"].value or request.backend or "automatic"
    return f"{count}{where}, device {device}, backend {backend}, precision {settings['mixed_precision'].value}."


def _device_count(request: LaunchRequest) -> int | None:
    """Number of accelerators that the processes of this machine see, as far as it is known without torch."""
    ids = request.settings["gpu_ids"].value
    return count_device_files(request.machine.environ, "all" if ids is None else ids)


def notes(request: LaunchRequest, plan: LaunchPlan | None = None) -> Iterator[str]:
    """Notes for the user before the run starts, one sentence each."""
    settings, environ, config = request.settings, request.machine.environ, request.config
    machines, rank = settings["num_machines"], settings["machine_rank"].value
    if machines.value > 1 and machines.origin.startswith("$"):
        again = f", restart {request.cluster.restarts}" if request.cluster.restarts else ""
        yield f"this is machine {rank} of {machines.value} (from {request.cluster.system or 'a variable'}{again})."
    if config is not None and config.path == default_path(environ):
        yield f"the settings of {config.path} are used."
    for setting in settings.values():
        for candidate in setting.overridden:
            if setting.origin.startswith("$") and candidate.value != setting.value:
                used, name = setting.definition.type.format(setting.value), setting.definition.name
                yield f"{setting.origin}={used} overrides {name}={candidate.value} ({candidate.origin})."
    yield from _notes_on_ignored(request)
    yield from _notes_on_devices(request)
    yield from _notes_on_arguments(request)
    yield from _notes_on_idle(request)
    yield from (installed.warning for installed in backends() if installed.failure)
    foreign = [f"${name}={environ[name]}" for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    if plan is not None and plan.removed and environ.get("WORLD_SIZE", "1") != "1":
        verb = "is" if len(foreign) == 1 else "are"
        yield f"{' and '.join(foreign)} {verb} ignored: this launch is a run of its own."


def _notes_on_ignored(request: LaunchRequest) -> Iterator[str]:
    """Notes on values that do not act, or act against what else is given."""
    for ignored in request.ignored:
        definition = request.settings[ignored.name].definition
        value = definition.type.format(ignored.candidate.value)
        yield f"{definition.name}={value} ({ignored.candidate.origin}) is ignored: {ignored.reason}."
    cpu, selection = request.settings["cpu"], request.selection
    if cpu.value and cpu.of_file and selection is not None and not (selection.alone or selection.on_cpu):
        yield f"the run uses the CPU: {cpu.text}."


def _notes_on_idle(request: LaunchRequest) -> Iterator[str]:
    """Notes on settings that this run does not read, and on other entries of the config file without effect."""
    idle, config = idle_options(request), request.config
    for name, option in idle.items():
        setting = request.settings[name]
        # A launcher's setting in a file, or with a variable, may be for other launches.
        of_launcher = option.startswith("--launcher")
        meant = setting.origin.startswith("--") and setting.definition.variable is None if of_launcher else True
        if setting.is_set and meant and not is_shared(setting):
            value = setting.definition.type.format(setting.value)
            yield f"{name}={value} ({setting.origin}) has no effect without {option}."
    if config is None:
        return
    for name, error in config.refused.items():
        if name in idle:
            place = error.failure.rpartition(" (")[2].rstrip(").")
            yield f"{name} ({place}) has no effect without {idle[name]}, and its value cannot be read."
    for entry in config.replaced:
        yield f"{config.path}:{entry.line} replaces {entry.key} of line {entry.replaces}."
    from difflib import get_close_matches

    keys = {str(setting.definition.key) for setting in request.settings.values()}
    for entry in config.unread:
        package = package_of(entry.key)
        near = next(iter(get_close_matches(entry.key, keys, n=1, cutoff=_MISSPELLING_SIMILARITY)), None)
        reader = "no installed package reads it" if package is None else f"{package}, which reads it, is not installed"
        hint = f" Did you mean {near!r}?" if near is not None and package is None else ""
        yield f"{entry.key}={entry.value} ({config.path}:{entry.line}) has no effect: {reader}.{hint}"


def _notes_on_devices(request: LaunchRequest) -> Iterator[str]:
    """Notes on devices that the launch names and the machine lacks."""
    settings = request.settings
    processes, machines = settings["num_processes"], settings["num_machines"].value
    if settings["cpu"].value or request.launcher.elsewhere:
        return
    count = _device_count(request)
    if count is None:
        return
    for name in ("multi_gpu", "gpu_ids") if count == 0 else ():
        if settings[name].value not in (None, False, "all"):
            yield f"{settings[name].text} has no effect: this machine has no accelerator."
    here = (processes.value or 0) // machines
    if 0 < count < here:
        gpus = f"{count} GPU{'s' if count > 1 else ''}"
        yield f"{here} processes share {gpus} of this machine; set num_processes to {count * machines} or fewer."


def _notes_on_arguments(request: LaunchRequest) -> Iterator[str]:
    """Notes on options of the launch that come after the script, which therefore receives them."""
    settings = (*settings_of(MachineSettings).values(), *settings_of(SwitchSettings).values())
    flags = {spelling for setting in settings if setting.flag for spelling in spelled(setting.flag)}
    for word in request.script.arguments:
        flag = word.partition("=")[0]
        if flag in flags:
            yield (
                f"{flag} after the script is an argument of the script; "
                "write it before the script to set it for the launch."
            )
