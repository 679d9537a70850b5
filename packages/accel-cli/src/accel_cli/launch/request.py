"""Reads a launch: flags, config file and cluster variables become settings, their backend and their launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from accel_cli.config.file import ConfigFile, default_path, read_config
from accel_cli.config.resolved import Ignored, ResolvedSettings, resolve_settings
from accel_cli.launch.backends import idle_tables, implied_backend, is_shared, selection_of
from accel_cli.launch.check import shown
from accel_cli.launch.interface import LauncherManifest
from accel_cli.launch.launchers import Choice, choose_launcher, launcher_options
from accel_cli.launch.options import add_launch_arguments, flag_values, launch_classes
from accel_cli.launch.outer_launch import without_outer
from accel_plugins.resolve import BACKENDS
from accel_state.clusters import Machines, machines_of
from accel_state.settings.environ import DEFAULT, Given

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = (
    "Request",
    "idle_options",
    "of_file",
    "read_request",
    "request_of",
)

_PROG: Final = "accel launch"


class Request(NamedTuple):
    """A parsed command line and its settings.

    Args:
        settings: every setting with its origin.
        environ: the launcher's variables, without those of an outer launch.
        config: the config file that was read, or None.
        by_default: whether this file is the user's default file, which no flag named.
        backend: the backend that the kind of run implies, or None if the processes select it.
        launcher: the launcher, and the reason for its selection.
        cluster: a batch system's description of the machines.
        arguments: the parsed command line.
        ignored: values that were given and are not used.
    """

    settings: ResolvedSettings
    environ: Mapping[str, str]
    config: ConfigFile | None
    by_default: bool
    backend: str | None
    launcher: Choice
    cluster: Machines
    arguments: Namespace
    ignored: tuple[Ignored, ...] = ()


def read_request(arguments: Namespace, environ: Mapping[str, str]) -> Request:
    """The settings from a parsed command line, the variables and the config file.

    Raises:
        SettingError: a setting cannot parse its value, the config file is not valid, or the launcher is not installed.
        Missing: no installed backend supports the config file's kind of run.
    """
    own = without_outer(environ)
    classes = launch_classes()
    config = _config(arguments.config_file, own, classes)
    cluster = machines_of(own)
    flags = flag_values(arguments, classes)
    settings = resolve_settings(classes, flags, own, config.values if config else {}, cluster.values)
    backend = settings["backend"]
    if backend.value is not None:
        BACKENDS.find(backend.value, f"Cannot use the backend {backend.value!r} ({backend.origin}).")
    implied = implied_backend(settings)
    # In an allocation, the drop-in behaves like the original: it starts processes on this machine.
    allocation = own if getattr(arguments, "prog", "") == _PROG else {}
    launcher = choose_launcher(settings, allocation)
    if config is not None:
        _check_refused(config, settings, launcher.manifest)
    ignored = tuple(_not_meant(settings, launcher.manifest))
    settings = settings.without(ignored)
    return Request(settings, own, config, arguments.config_file is None, implied, launcher, cluster, arguments, ignored)


def request_of(words: Sequence[str], environ: Mapping[str, str], config_file: str | None = None) -> Request:
    """The request of `accel launch` with these arguments; `config_file` replaces the config file of the arguments.

    Raises:
        SettingError: as for `read_request`.
    """
    from argparse import Namespace

    from accel_cli.parser import Parser

    parsed = Namespace(config_file=None, prog=_PROG)
    if words:
        parser = Parser("accel launch")
        add_launch_arguments(parser)
        parser.parse_args(list(words), parsed)
    if config_file is not None:
        parsed.config_file = config_file
    return read_request(parsed, environ)


def _check_refused(config: ConfigFile, settings: ResolvedSettings, launcher: LauncherManifest) -> None:
    """Check that this run reads no setting whose value in the config file cannot be parsed.

    Raises:
        SettingError: it reads one.
    """
    idle = idle_options(settings, launcher)
    for name, error in config.refused.items():
        if name not in idle and not settings[name].given:
            raise error


def idle_options(settings: ResolvedSettings, launcher: LauncherManifest) -> dict[str, str]:
    """For each setting that this run does not read: the option with which a run would read it."""
    tables = idle_tables(settings)
    of_engines = {name: tables[table] for name in settings if (table := name.partition(".")[0]) in tables}
    return {**launcher_options(launcher), **of_engines}


def _not_meant(settings: ResolvedSettings, launcher: LauncherManifest) -> Iterator[Ignored]:
    """Values that cannot be meant for this run, such as those in a file that was written for another one."""
    machines, selection = settings["num_machines"], selection_of(settings)
    processes = settings["num_processes"]
    alone = selection is not None and selection.alone and machines.value == 1
    if selection is not None and alone and of_file(processes.candidates[0]) and processes.value > 1:
        yield Ignored("num_processes", processes.candidates[0], f"{shown(selection.source)} is one process")
    tables = idle_tables(settings)
    for name, effect in settings.items():
        user = tables.get(name.partition(".")[0]) if is_shared(effect) else None
        if user is not None and effect.given and of_file(effect.candidates[0]):
            yield Ignored(name, effect.candidates[0], f"it needs {user}")
    if machines.value == 1 and launcher.one_machine:
        yield from _addresses_of_others(settings)


def _addresses_of_others(settings: ResolvedSettings) -> Iterator[Ignored]:
    """Addresses at which the processes of one machine cannot meet, and the ports that belong to them."""
    from accel_cli.launch.rendezvous import is_own_address

    address, port = settings["main_process_ip"], settings["main_process_port"]
    alone = "the run is on this machine alone"
    for given in address.candidates[:-1]:
        if is_own_address(given.value):
            continue
        yield Ignored("main_process_ip", given, f"{alone}, and this is not its address")
        if given.origin == f"${address.setting.variable}":
            others = (one for one in port.candidates if one.origin == f"${port.setting.variable}")
            yield from (
                Ignored("main_process_port", one, f"{alone}, and {given.origin} is of another run") for one in others
            )


def of_file(given: Given) -> bool:
    """Whether a config file gave a value."""
    return given.origin != DEFAULT and not given.origin.startswith(("--", "$"))


def _config(given: str | None, environ: Mapping[str, str], classes: tuple[type, ...]) -> ConfigFile | None:
    if given is not None:
        return read_config(given, classes)
    usual = default_path(environ)
    return read_config(usual, classes) if os.path.isfile(usual) else None
