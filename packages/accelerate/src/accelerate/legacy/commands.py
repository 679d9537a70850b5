"""The functions by which scripts and libraries called the commands of the original: parser, command, main.

Each is the command of `accel_cli` under its old name.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from accel_cli import main as command_line
from accel_cli.command import Parser, find_command

__all__ = ("launch_command", "launch_command_parser", "launch_main", "main")


def main() -> int:
    """What the console script `accelerate` runs; returns the exit code."""
    return command_line.main(prog="accelerate")


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate launch`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, for a parser inside another one.
    """
    return _parser("launch", subparsers, launch_command)


def launch_command(args: Namespace) -> None:
    """Launch what was parsed.

    Raises:
        SystemExit: the run failed; it has the exit code.
    """
    _run("launch", args)


def launch_main() -> int:
    """What the console script `accelerate-launch` runs; returns the exit code."""
    return _main("launch")


def _parser(name: str, subparsers: Any, function: Callable[[Namespace], None]) -> ArgumentParser:
    command = find_command(name)
    parser: ArgumentParser = (
        Parser(prog=f"accelerate {name}", description=command.help)
        if subparsers is None
        else subparsers.add_parser(name, help=command.help)
    )
    command.add_arguments(parser)
    if subparsers is not None:
        parser.set_defaults(func=function)
    return parser


def _run(name: str, arguments: Namespace) -> None:
    code = find_command(name).run(arguments)
    if code != 0:
        sys.exit(code)


def _main(name: str, arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    return command_line.main([name, *given], prog="accelerate")
