"""Reads the script and the settings of a launch from a command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from accel_cli.config.file import ConfigFile, default_path, read_config
from accel_cli.config.resolved import Ignored, ResolvedSettings, resolve_settings
from accel_cli.launch.backends import idle_tables, implied_backend, is_shared, selection_of
from accel_cli.launch.check import shown
from accel_cli.launch.interface import LauncherManifest, Script
from accel_cli.launch.launchers import Choice, choose_launcher, launcher_options
from accel_cli.launch.options import add_launch_arguments, flag_values, launch_classes
from accel_cli.launch.outer_launch import without_outer
from accel_plugins.resolve import BACKENDS
from accel_state.clusters import Machines, machines_of
from accel_state.errors import Conflict, SettingError
from accel_state.settings.environ import DEFAULT, Given

if TYPE_CHECKING:
    from argparse import Namespace
    from importlib.machinery import ModuleSpec

__all__ = (
    "Request",
    "find_script",
    "how_to_run",
    "idle_options",
    "of_file",
    "read_request",
    "request_of",
    "script_of",
)

_ZIPPED: Final = (".zip", ".pyz")


def script_of(arguments: Namespace) -> Script:
    """The script, module or program that a command line of `accel launch` selects.

    Raises:
        SettingError: it does not exist.
    """
    words = arguments.script[arguments.script[:1] == ["--"] :]
    target, *script_arguments = words or [""]
    return find_script(target, script_arguments, arguments.module, arguments.no_python)


def find_script(target: str, arguments: Sequence[str], module: bool, no_python: bool) -> Script:
    """Check and describe the script, module or program that every process will run.

    Args:
        target: path of a script, name of a module with `module`, or a program with `no_python`.
        arguments: its arguments.

    Raises:
        SettingError: it does not exist.
    """
    how = how_to_run(module, no_python)
    _CHECKS[how](target)
    return Script(how, target, tuple(arguments))


def how_to_run(module: bool, no_python: bool) -> str:
    """The value of `Script.how` for a command line.

    Raises:
        Conflict: both --module and --no_python are set.
    """
    if module and no_python:
        raise Conflict(
            "Cannot combine --module and --no_python.",
            "Python runs modules, and --no_python runs a program without Python.",
            "Remove one of them.",
        )
    return "module" if module else "program" if no_python else "script"


def _check_script(target: str) -> None:
    asked = f"Cannot start the script {target}."
    if not target:
        raise SettingError("Cannot launch.", "The script is missing.", "Run: accel launch [options] script.py")
    if not os.path.exists(target):
        where = "" if os.path.isabs(target) else f" in {os.getcwd()}"
        remedy = _as_module(target) or "Check the path."
        raise SettingError(asked, f"There is no such file{where}.", remedy)
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise SettingError(asked, "It is a folder without the file __main__.py.", "Give the path of the file to run.")
    if not os.access(target, os.R_OK):
        raise SettingError(asked, "This user is not allowed to read it.", "Change its permissions.")


def _as_module(target: str) -> str | None:
    """The remedy for a name that looks like a module name."""
    if os.sep in target or target.endswith(".py") or not all(part.isidentifier() for part in target.split(".")):
        return None
    return "Check the path, or add -m to run a module."


def _check_module(target: str) -> None:
    from importlib.util import find_spec

    asked = f"Cannot start the module {target}."
    if not all(part.isidentifier() for part in target.split(".")):
        near = target.removesuffix(".py").replace(os.sep, ".")
        raise SettingError(asked, "This is not a module name.", f"Write it as {near}, or remove -m to run a path.")
    if target.endswith(".py") and os.path.isfile(target):
        raise SettingError(asked, f"{target} is a file.", f"Remove -m, or write {target.removesuffix('.py')}.")
    first = target.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        spec = find_spec(first)
    except ValueError:
        # The module is imported, but has no information about its source.
        return
    finally:
        del sys.path[0]
    missing = first if spec is None else _missing_part(spec, target)
    if missing.endswith(".__main__"):
        raise SettingError(asked, "It is a package without a __main__ module.", "Give the name of the module to run.")
    if missing:
        raise SettingError(
            asked,
            f"There is no module {missing!r}.",
            "Install it, or launch from the folder that contains it.",
        )


def _missing_part(spec: ModuleSpec, target: str) -> str:
    """The missing part of a dotted name, or the missing `__main__` module; found without importing the package."""
    from importlib.machinery import PathFinder

    names = f"{target}.__main__".split(".")
    for count in range(2, len(names) + 1):
        if spec.submodule_search_locations is None:
            # A module has no submodules, and needs none to run.
            return "" if count == len(names) else ".".join(names[:count])
        if _extends_itself(spec):
            return ""
        found = PathFinder.find_spec(".".join(names[:count]), spec.submodule_search_locations)
        if found is None:
            return ".".join(names[:count])
        spec = found
    return ""


def _extends_itself(spec: ModuleSpec) -> bool:
    """Whether a package may find its submodules in other folders."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return spec.origin is not None
    try:
        with open(spec.origin, "rb") as file:
            return b"__path__" in file.read()
    except OSError:
        return True


def _check_program(target: str) -> None:
    import shutil

    if shutil.which(target) is None:
        raise SettingError(
            f"Cannot start the program {target}.",
            "There is no such executable file.",
            "Check the path and its permissions.",
        )


_CHECKS: Final = {"script": _check_script, "module": _check_module, "program": _check_program}


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
