"""`accel test`: runs a short training with the settings of a config file, and checks its results.

Without a number of processes, it takes one for each device, and two on a machine that would run a single one on the
CPU, because one process proves nothing about the others.

The script is part of the package with the Accelerator, and is found through the entry-point group `accel.scripts`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_state.errors import Missing
from accel_state.plugins import PluginGroup

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "SCRIPTS", "Test")

SCRIPTS: Final[PluginGroup[object]] = PluginGroup("accel.scripts", "script", own="last")
"""The scripts of `accel test`; only the name of the module of the one named "test" is used."""


class Test:
    """Launches the test script of an installed package, and reports whether it succeeded."""

    help = "test processes, collectives, loaders and training on this machine"
    examples = ("", "--config_file cluster.yaml -- --num_processes 4")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the config file, and further arguments of the launch."""
        parser.usage = f"{parser.prog} [--config_file PATH] [-- launch arguments]"
        parser.add_argument(
            *spelled("--config_file"),
            metavar="PATH",
            help="Config file; by default the one that `accel config` writes.",
        )
        parser.add_argument("launch", nargs="...", help="Further arguments of `accel launch`, after --.")

    def run(self, arguments: Namespace) -> int:
        """Launch the script and return its exit code.

        Raises:
            Missing: no installed package provides the script.
        """
        from accel_cli.commands.launch import COMMAND as LAUNCH
        from accel_cli.parser import Parser

        config = [] if arguments.config_file is None else ["--config_file", arguments.config_file]
        words = [*config, *arguments.launch[arguments.launch[:1] == ["--"] :], "--module", _script()]
        parser = Parser("accel launch")
        LAUNCH.add_arguments(parser)
        request = parser.parse_args(words)
        if _is_alone(request):
            request = parser.parse_args(["--num_processes", "2", *words])
        code = LAUNCH.run(request)
        if code != 0:
            print("accel test: the checks failed; the lines above show the first failure.", file=sys.stderr)
        return code


def _is_alone(arguments: Namespace) -> bool:
    """Whether a launch would start one process on the CPU although nobody set their number."""
    from accel_cli.launch.devices import count_device_files
    from accel_cli.launch.launchers import LOCAL
    from accel_cli.launch.request import read_request

    request = read_request(arguments, os.environ)
    settings = request.settings
    numbers = ("num_processes", "num_machines", "nnodes", "nproc_per_node")
    if request.launcher is not LOCAL or any(name in settings and settings[name].is_set for name in numbers):
        return False
    return request.local_processes() == 1 and (bool(settings["cpu"].value) or count_device_files({}) == 0)


def _script() -> str:
    """Name of the module with the script."""
    for script in SCRIPTS.plugins():
        if script.name == "test":
            return script.target.partition(":")[0]
    raise Missing(
        "Cannot run `accel test`.",
        "No installed package provides its script.",
        "Install accel-torch.",
    )


COMMAND: Final = Test()
