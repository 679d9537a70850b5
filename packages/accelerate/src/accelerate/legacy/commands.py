"""The functions by which scripts and libraries called the commands of the original: parser, command, main.

Each is the command of `accel_cli` under its old name.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, Final

from accel_cli import main as command_line
from accel_cli.command import find_command
from accel_cli.commands.tpu_config import call, command_line_of
from accelerate.legacy.fsdp2_configs import to_fsdp2_command
from accelerate.legacy.parsing import CustomArgumentParser, add_launch_arguments, own_arguments

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
    "merge_command",
    "merge_command_parser",
    "merge_main",
    "self_test_command",
    "self_test_command_parser",
    "self_test_main",
    "to_fsdp2_command_parser",
    "tpu_command_launcher",
    "tpu_command_parser",
    "tpu_main",
)

_SPELLING: Final = "Options may be written with dashes as well, such as --num-processes."


def main() -> int:
    """What the console script `accelerate` runs; returns the exit code."""
    return command_line.main(prog="accelerate")


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate launch`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, for a parser inside another one.
    """
    return _parser("launch", subparsers, launch_command, add_launch_arguments)


def launch_command(args: Namespace) -> None:
    """Launch what was parsed.

    Raises:
        SystemExit: the run failed; it has the exit code.
    """
    _run("launch", own_arguments(args))


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
    """Show what is installed on this machine."""
    _run("env", args)


def env_main() -> int:
    """What `python -m accelerate.commands.env` runs; returns the exit code."""
    return _main("env")


def estimate_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate estimate-memory`; see `launch_command_parser`."""
    return _parser("estimate-memory", subparsers, estimate_command)


def estimate_command(args: Namespace) -> None:
    """Estimate the memory of a model.

    Raises:
        NotFound: the Hub has no such model; `NoAccess` if access to the model is restricted.
        SettingError: the model cannot be built.
    """
    from accel_bigmodel.estimate import estimate_memory, table_of
    from accelerate.legacy.estimating import is_on_hub, model_of

    if not is_on_hub(args.model_name):
        _run("estimate-memory", args)
        return
    sys.stdout.write(table_of(estimate_memory(model_of(args), args.dtypes)) + "\n")


def estimate_main() -> int:
    """What the console script `accelerate-estimate-memory` runs; returns the exit code."""
    return _main("estimate-memory")


def merge_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate merge-weights`; see `launch_command_parser`."""
    return _parser("merge-weights", subparsers, merge_command)


def merge_command(args: Namespace) -> None:
    """Put shards together."""
    _run("merge-weights", args)


def merge_main() -> int:
    """What the console script `accelerate-merge-weights` runs; returns the exit code."""
    return _main("merge-weights")


def self_test_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate test`; see `launch_command_parser`."""
    return _parser("test", subparsers, self_test_command)


def self_test_command(args: Namespace) -> None:
    """Run a short training and check the result."""
    _run("test", args)


def self_test_main() -> int:
    """What `python -m accelerate.commands.test` runs; returns the exit code."""
    return _main("test")


def to_fsdp2_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate to-fsdp2`; see `launch_command_parser`."""
    return _parser("to-fsdp2", subparsers, to_fsdp2_command)


def tpu_command_parser(subparsers: Any = None) -> ArgumentParser:
    """The parser of `accelerate tpu-config`; see `launch_command_parser`."""
    return _parser("tpu-config", subparsers, tpu_command_launcher)


def tpu_command_launcher(args: Namespace) -> None:
    """Run commands on every machine of a TPU pod, or show the command line that does."""
    argv = command_line_of(args, package="accelerate")
    if args.debug:
        sys.stdout.write(f"Running {' '.join(argv)}\n")
    elif code := call(argv):
        sys.exit(code)


def tpu_main() -> int:
    """What `python -m accelerate.commands.tpu` runs; returns the exit code."""
    return _main("tpu-config")


def _parser(
    name: str,
    subparsers: Any,
    function: Callable[[Namespace], None],
    add_arguments: Callable[[ArgumentParser], None] | None = None,
) -> ArgumentParser:
    command = find_command(name)
    parser: ArgumentParser = (
        CustomArgumentParser(f"accelerate {name}", description=command.help, epilog=_SPELLING, allow_abbrev=False)
        if subparsers is None
        else subparsers.add_parser(name, help=command.help)
    )
    (add_arguments or command.add_arguments)(parser)
    if subparsers is not None:
        parser.set_defaults(func=function)
    return parser


def _run(name: str, arguments: Namespace) -> None:
    code = find_command(name).run(arguments)
    if code != 0:
        sys.exit(code)


def _main(name: str) -> int:
    return command_line.main([name, *sys.argv[1:]], prog="accelerate")
