"""What a launch tells the user before it starts: what it starts, and what the user may not have meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from accel_cli.command import spelled
from accel_cli.config.file import ConfigFile
from accel_cli.launch.backends import SwitchSettings, backends, idle, selection_of
from accel_cli.launch.check import shown
from accel_cli.launch.devices import count_device_files
from accel_cli.launch.interface import LaunchPlan
from accel_cli.launch.launchers import launcher_options
from accel_cli.launch.request import Request, idle_options, of_file
from accel_cli.launch.settings import MachineSettings
from accel_plugins.separate import package_of
from accel_state.settings.schema import settings_of

__all__ = ("first_line", "notes")

_MISSPELLED: Final = 0.9
"""Similarity from which a key counts as a misspelled one."""


def first_line(request: Request, plan: LaunchPlan) -> str:
    """What a launch starts: processes, device, backend and precision."""
    settings = request.settings
    size, machines = plan.world_size, settings["num_machines"].value
    count = f"{size} process{'es' if size > 1 else ''}" if size else f"processes through {plan.launcher}"
    where = f" on {int(machines)} machines" if machines > 1 else ""
    device = "cpu" if settings["cpu"].value or _device_count(request) == 0 else "accelerator"
    backend = settings["backend"].value or request.backend or "automatic"
    return f"{count}{where}, device {device}, backend {backend}, precision {settings['mixed_precision'].value}."


def _device_count(request: Request) -> int | None:
    """Number of accelerators that the processes of this machine see, as far as it is known without torch."""
    ids = request.settings["gpu_ids"].value
    return count_device_files(request.environ, "all" if ids is None else ids)


def notes(request: Request) -> Iterator[str]:
    """Notes for the user before the run starts, one sentence each."""
    machines, rank = request.settings["num_machines"].value, request.settings["machine_rank"].value
    if machines > 1 and request.settings["num_machines"].origin.startswith("$"):
        again = f", restart {request.cluster.restarts}" if request.cluster.restarts else ""
        yield f"this is machine {rank} of {machines} (from {request.cluster.system or 'a variable'}{again})."
    if request.config is not None and request.by_default:
        yield f"the settings of {request.config.path} are used."
    for effect in request.settings.values():
        for given in effect.overridden:
            if effect.origin.startswith("$") and given.value != effect.value:
                used, name = effect.setting.type.format(effect.value), effect.setting.name
                yield f"{effect.origin}={used} overrides {name}={given.value} ({given.origin})."
    yield from _notes_on_ignored(request)
    yield from _notes_on_devices(request)
    yield from _notes_on_words(request.arguments.script if hasattr(request.arguments, "script") else [])
    for name, effect, user in idle(request.settings):
        value = effect.setting.type.format(effect.value)
        yield f"{name}={value} ({effect.origin}) has no effect without {user}."
    for name, option in launcher_options(request.launcher.manifest).items():
        effect = request.settings[name]
        # A setting with a variable is read by the processes, with any launcher.
        if effect.given and effect.setting.variable is None and effect.origin.startswith("--"):
            value = effect.setting.type.format(effect.value)
            yield f"{name}={value} ({effect.origin}) has no effect without {option}."
    if request.config is not None:
        yield from _notes_on_file(request.config, request)
    yield from (installed.warning for installed in backends() if installed.failure)


def _notes_on_ignored(request: Request) -> Iterator[str]:
    """Notes on values that do not act, or act against what else is given."""
    for ignored in request.ignored:
        known = request.settings[ignored.name].setting
        value = known.type.format(ignored.given.value)
        yield f"{known.name}={value} ({ignored.given.origin}) is ignored: {ignored.reason}."
    cpu, selection = request.settings["cpu"], selection_of(request.settings)
    elsewhere = selection is not None and not (selection.alone or selection.on_cpu)
    if cpu.value and of_file(cpu.candidates[0]) and elsewhere:
        yield f"the run uses the CPU: {shown(cpu)}."


def _notes_on_file(config: ConfigFile, request: Request) -> Iterator[str]:
    """Notes on the entries of the config file that have no effect."""
    idle = idle_options(request.settings, request.launcher.manifest)
    for name, error in config.refused.items():
        if name in idle:
            place = error.failure.rpartition(" (")[2].rstrip(").")
            yield f"{name} ({place}) has no effect without {idle[name]}, and its value cannot be read."
    for entry in config.replaced:
        yield f"{config.path}:{entry.line} replaces {entry.key} of line {entry.replaces}."
    from difflib import get_close_matches

    keys = {str(effect.setting.key) for effect in request.settings.values()}
    for entry in config.unread:
        package = package_of(entry.key)
        near = next(iter(get_close_matches(entry.key, keys, n=1, cutoff=_MISSPELLED)), None)
        reader = "no installed package reads it" if package is None else f"{package}, which reads it, is not installed"
        hint = f" Did you mean {near!r}?" if near is not None and package is None else ""
        yield f"{entry.key}={entry.value} ({config.path}:{entry.line}) has no effect: {reader}.{hint}"


def _notes_on_devices(request: Request) -> Iterator[str]:
    """Notes on devices that the launch names and the machine lacks."""
    settings = request.settings
    processes, machines = settings["num_processes"], settings["num_machines"].value
    if settings["cpu"].value or request.launcher.manifest.elsewhere:
        return
    count = _device_count(request)
    if count is None:
        return
    for name in ("multi_gpu", "gpu_ids") if count == 0 else ():
        if settings[name].value not in (None, False, "all"):
            yield f"{shown(settings[name])} has no effect: this machine has no accelerator."
    here = (processes.value or 0) // machines
    if 0 < count < here:
        gpus = f"{count} GPU{'s' if count > 1 else ''}"
        yield f"{here} processes share {gpus} of this machine; set num_processes to {count * machines} or fewer."


def _notes_on_words(words: Sequence[str]) -> Iterator[str]:
    """Notes on options of the launch that come after the script, which therefore receives them."""
    settings = (*settings_of(MachineSettings).values(), *settings_of(SwitchSettings).values())
    flags = {spelling for known in settings if known.flag for spelling in spelled(known.flag)}
    for word in words[1:]:
        flag = word.partition("=")[0]
        if flag in flags:
            yield (
                f"{flag} after the script is an argument of the script; "
                "write it before the script to set it for the launch."
            )
