"""`accel test`: runs a short training with the settings of a config file, and checks its results.

The script is part of the package with the Accelerator, and is found through the entry-point group `accel.scripts`.
"""

from __future__ import annotations

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
    """The command; see `accel_cli.command.Command`."""

    help = "test processes, collectives, loaders and training on this machine"

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
        code = LAUNCH.run(parser.parse_args(words))
        if code != 0:
            print("accel test: the checks failed; the lines above show the first failure.", file=sys.stderr)
        return code


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
