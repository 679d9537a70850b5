"""Every option of a launch: those of this package and those that the settings of backends bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_cli.launch.arguments import CARRIED, LAUNCH_CLASSES
from accel_cli.launch.backends import backend_settings
from accel_cli.launch.flags import add_settings, flag_rows

if TYPE_CHECKING:
    from argparse import ArgumentParser

__all__ = ("add_launch_arguments", "carried_classes", "launch_classes", "launch_manual")

_CONFIG: Final = ("--config_file PATH", "Config file to read; the user's own when not given, if there is one.")
_SCRIPT: Final = (
    ("-m, --module", "The script is the name of a module."),
    ("--no_python", "The script is a program that is not Python."),
    ("-q, --quiet", "Tell nothing but the traceback of a failure."),
)


def launch_classes() -> tuple[type, ...]:
    """Settings classes of the launcher and of the installed backends."""
    return (*LAUNCH_CLASSES, *backend_settings())


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


def launch_manual(prog: str) -> str:
    """The help text of `accel launch`."""
    from accel_cli.manual import render

    usage = f"{prog} [options] script [options of the script]"
    about = "Start a script on one or many processes. Every option may also be written with dashes for underscores."
    return render(usage, about, {"options": [_CONFIG, *_SCRIPT], **flag_rows(launch_classes())})
