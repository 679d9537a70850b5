"""`accel completion`: prints a script with which a shell completes `accel` at the Tab key, and computes completions.

The library argcomplete communicates with the shell. It starts `accel` again with a variable set; only then does
`answer` run.
"""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import find_command, installed_commands
from accel_cli.parser import Parser
from accel_state.errors import AccelError
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "REQUIREMENT", "SHELLS", "Completion", "answer", "whole_parser")

REQUIREMENT: Final = Requirement("argcomplete")


def answer(prog: str) -> None:
    """Print the completions at the cursor for the shell, and exit."""
    import argcomplete

    argcomplete.autocomplete(whole_parser(prog, _command_of_line(os.environ.get("COMP_LINE", ""))))


def whole_parser(prog: str, loaded: str | None) -> ArgumentParser:
    """A parser with the names of all commands, and the arguments of one of them."""
    parser = Parser(prog)
    commands = parser.add_subparsers()
    for name in installed_commands():
        subparser = commands.add_parser(name)
        if name == loaded:
            _add_arguments(name, subparser)
    return parser


def _add_arguments(name: str, parser: Parser) -> None:
    try:
        find_command(name).add_arguments(parser)
    except AccelError:
        # A command that cannot be loaded raises its error when it is run.
        return
    for action in parser._actions:
        choices = _choices(action.dest)
        if choices:
            # These are not argparse's own choices, because the setting itself reports a wrong value.
            action.completer = lambda choices=choices, **_: choices  # type: ignore[attr-defined]


def _choices(destination: str) -> tuple[str, ...]:
    from accel_cli.launch.interface import AUTO
    from accel_cli.launch.launchers import LAUNCHERS, launch_classes
    from accel_cli.launch.options import setting_of

    setting: Any = setting_of(destination, launch_classes())
    if setting is not None and setting.name == "launcher":
        return (AUTO, *LAUNCHERS.names())
    return () if setting is None else tuple(setting.type.choices)


def _command_of_line(line: str) -> str | None:
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    return words[1] if len(words) > 1 else None


SHELLS: Final = ("bash", "zsh", "fish", "tcsh", "powershell")


class Completion:
    """Prints the completion script of a shell."""

    help = "print a completion script for a shell"
    examples = ("bash", "zsh")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the shell."""
        parser.epilog = 'For bash, add this line to ~/.bashrc: eval "$(accel completion bash)"'
        parser.add_argument("shell", choices=SHELLS, help="Shell to print the script for.")

    def run(self, arguments: Namespace) -> int:
        """Print the script."""

        REQUIREMENT.demand(f"Cannot complete commands in {arguments.shell}.")
        from argcomplete.shell_integration import shellcode

        print(shellcode(["accel"], shell=arguments.shell))
        return 0


COMMAND: Final = Completion()
