"""Every option of a launch: those of this package and those that the settings of backends bring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_cli.command import spelled
from accel_cli.launch.arguments import CARRIED, LAUNCH_CLASSES
from accel_cli.launch.backends import backend_settings
from accel_cli.launch.flags import add_settings

if TYPE_CHECKING:
    from argparse import ArgumentParser

__all__ = ("add_launch_arguments", "carried_classes", "launch_classes")


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
