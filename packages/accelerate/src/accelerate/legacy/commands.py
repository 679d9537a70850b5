"""The functions by which scripts and libraries called the commands of the original: parser, command, main.

Each is the command of `accel_cli` under its old name.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from accel_cli import main as command_line
from accel_cli.command import find_command
from accel_cli.parser import Parser

__all__ = (
    "config_command",
    "config_command_parser",
    "config_main",
    "env_command",
    "env_command_parser",
    "env_main",
    "estimate_command",
    "estimate_command_parser",
    "estimate_main",
    "launch_command",
    "launch_command_parser",
    "launch_main",
    "main",
)


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


def config_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate config`; see `launch_command_parser`."""
    return _parser("config", subparsers, config_command)


def config_command(args: Namespace) -> None:
    """Write a config file."""
    _run("config", args)


def config_main() -> int:
    """What the console script `accelerate-config` runs; returns the exit code."""
    return _main("config")


def env_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate env`; see `launch_command_parser`."""
    return _parser("env", subparsers, env_command)


def env_command(args: Namespace) -> None:
    """Show what is installed here."""
    _run("env", args)


def env_main() -> int:
    """What `python -m accelerate.commands.env` runs; returns the exit code."""
    return _main("env")


def estimate_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate estimate-memory`; see `launch_command_parser`."""
    return _parser("estimate-memory", subparsers, estimate_command)


def estimate_command(args: Namespace) -> None:
    """Show how much memory a model takes."""
    _run("estimate-memory", args)


def estimate_main() -> int:
    """What the console script `accelerate-estimate-memory` runs; returns the exit code."""
    return _main("estimate-memory")


def _parser(name: str, subparsers: Any, function: Callable[[Namespace], None]) -> ArgumentParser:
    command = find_command(name)
    parser: ArgumentParser = (
        Parser(f"accelerate {name}", command.help)
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


def _main(name: str) -> int:
    return command_line.main([name, *sys.argv[1:]], prog="accelerate")
