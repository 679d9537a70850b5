"""Every option of a launch: those of this package, of launchers and of backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_cli.command import spelled
from accel_cli.launch.arguments import CARRIED, LAUNCH_CLASSES
from accel_cli.launch.backends import backend_settings
from accel_cli.launch.flags import add_settings, destination, is_switch, settings_by_flag
from accel_cli.launch.launchers import launcher_settings

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("add_launch_arguments", "carried_classes", "launch_classes", "launch_options")


def launch_classes() -> tuple[type, ...]:
    """Settings classes of `accel launch`, of the installed launchers and of the installed backends."""
    return tuple(dict.fromkeys((*LAUNCH_CLASSES, *launcher_settings(), *backend_settings())))


def carried_classes() -> tuple[type, ...]:
    """Those of them that the started processes read back from their environment."""
    return (*CARRIED, *backend_settings())


def add_launch_arguments(parser: ArgumentParser) -> None:
    """Declare the options of a launch, and what it starts with all that follows."""
    parser.add_argument(*spelled("--config_file"), metavar="PATH")
    add_settings(parser, launch_classes())
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument(*spelled("--no_python"), action="store_true")
    parser.add_argument("script", nargs="...")


def launch_options(arguments: Namespace) -> tuple[str, ...]:
    """The options of a parsed command line of `accel launch`, in their full spelling, without the script."""
    words = [f"--config_file={arguments.config_file}"] if arguments.config_file is not None else []
    for flag, known in settings_by_flag(launch_classes()).items():
        given = getattr(arguments, destination(flag), None)
        if given is None:
            continue
        if is_switch(known):
            words.append(flag if given == "true" else f"--no_{flag.removeprefix('--')}")
        else:
            words += [f"{flag}={text}" for text in (given if isinstance(given, list) else [given])]
    switches = {"--quiet": arguments.quiet, "--module": arguments.module, "--no_python": arguments.no_python}
    return (*words, *(switch for switch, given in switches.items() if given))
