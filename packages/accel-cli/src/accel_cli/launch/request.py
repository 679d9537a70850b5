"""From a command line to the settings of a launch, with notes for the user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from accel_cli.config.file import ConfigFile, read_config
from accel_cli.config.location import default_path
from accel_cli.config.resolved import ResolvedSettings, resolve_settings
from accel_cli.launch.backends import backend_for, check_backend, failures
from accel_cli.launch.cluster_environment import ClusterEnvironment, read_cluster_environment
from accel_cli.launch.flags import flag_values
from accel_cli.launch.kinds import idle, kind_of, named_by
from accel_cli.launch.launchers import Choice, choose_launcher, idle_settings
from accel_cli.launch.nested import without_outer
from accel_cli.launch.options import add_launch_arguments, launch_classes

if TYPE_CHECKING:
    from argparse import Namespace

_PROG: Final = "accel launch"

__all__ = ("Request", "notes", "read_request", "request_of")


class Request(NamedTuple):
    """A parsed command line and its settings.

    Args:
        settings: every setting with its origin.
        environ: the launcher's variables, without those that an outer launch wrote.
        config: the config file that was read, or None.
        by_default: whether that file is the user's own one, read by default.
        backend: the backend that follows from the kind of run, or None where the processes choose it.
        launcher: what starts the processes, and why.
        cluster: what a batch system says about the machines.
        arguments: the parsed command line.
    """

    settings: ResolvedSettings
    environ: Mapping[str, str]
    config: ConfigFile | None
    by_default: bool
    backend: str | None
    launcher: Choice
    cluster: ClusterEnvironment
    arguments: Namespace


def read_request(arguments: Namespace, environ: Mapping[str, str]) -> Request:
    """The settings that follow from a parsed command line, the variables and the config file.

    Raises:
        SettingError: a value is not of its setting's kind, the config file cannot be used, or nobody offers
            the launcher.
        Missing: the config file is for a kind of run that nothing installed offers.
    """
    own = without_outer(environ)
    classes = launch_classes()
    config = _config(arguments.config_file, own, classes)
    cluster = read_cluster_environment(own, os.uname().nodename if hasattr(os, "uname") else "")
    flags = flag_values(arguments, classes)
    settings = resolve_settings(classes, flags, own, config.values if config else {}, cluster.values)
    backend, asked = settings["backend"], kind_of(settings)
    if backend.value is not None:
        check_backend(backend.value, backend.origin)
    wanted = asked is not None and not asked[0].by_device and backend.value is None
    implied = backend_for(asked[0].label, asked[1].origin, named_by(*asked)) if asked is not None and wanted else None
    # The drop-in does in an allocation what the original does: it starts processes on this machine.
    allocation = own if getattr(arguments, "prog", "") == _PROG else {}
    launcher = choose_launcher(settings, allocation)
    return Request(settings, own, config, arguments.config_file is None, implied, launcher, cluster, arguments)


def request_of(words: Sequence[str], environ: Mapping[str, str], config_file: str | None = None) -> Request:
    """The request of `accel launch` with these arguments; `config_file` overrides the file of the arguments.

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


def _config(given: str | None, environ: Mapping[str, str], classes: tuple[type, ...]) -> ConfigFile | None:
    if given is not None:
        return read_config(given, classes)
    usual = default_path(environ)
    return read_config(usual, classes) if os.path.isfile(usual) else None


def notes(request: Request) -> Iterator[str]:
    """What a user should know before the run starts, one sentence each."""
    machines, rank = request.settings["num_machines"].value, request.settings["machine_rank"].value
    if machines > 1 and request.settings["num_machines"].origin.startswith("$"):
        yield f"this is machine {rank} of {machines}, as {request.cluster.system or 'a variable'} says."
    if request.config is not None and request.by_default:
        yield f"the settings of {request.config.path} are used."
    for effect in request.settings.values():
        for given in effect.overridden:
            if effect.origin.startswith("$") and given.value != effect.value:
                used, name = effect.setting.type.format(effect.value), effect.setting.name
                yield f"{effect.origin}={used} overrides {name}={given.value} ({given.origin})."
    for name, effect, user in idle(request.settings):
        value = effect.setting.type.format(effect.value)
        yield f"{name}={value} ({effect.origin}) has no effect without {user}."
    for name, effect, launcher in idle_settings(request.settings, request.launcher.manifest):
        value = effect.setting.type.format(effect.value)
        yield f"{name}={value} ({effect.origin}) has no effect without --launcher {launcher}."
    for entry in request.config.unread if request.config is not None else ():
        where = f"{request.config.path}:{entry.line}" if request.config is not None else ""
        yield f"{entry.key}={entry.value} ({where}) has no effect: nothing that is installed reads it."
    for failure in failures():
        yield f"the backend {failure.extension.name!r} ({failure.extension.origin}) is broken: {failure.error!r}."
