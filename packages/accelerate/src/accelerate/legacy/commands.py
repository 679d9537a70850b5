"""The functions by which scripts and libraries call the commands of the original: a main each, some with a parser.

Each is the command of `accel_cli` under its old name.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from accel_cli import main as command_line
from accel_cli.command import find_command
from accel_cli.commands.tpu_config import call, command_line_of
from accelerate.legacy.fsdp2_configs import to_fsdp2_command
from accelerate.legacy.parsing import OldParser, add_launch_arguments, own_arguments


def _runner(name: str) -> Callable[[Namespace], None]:
    def run(args: Namespace) -> None:
        """Run the command.

        Raises:
            SystemExit: it failed; the error has the exit code.
        """
        code = find_command(name).run(args)
        if code != 0:
            sys.exit(code)

    return run


def _parser_of(
    name: str, run: Callable[[Namespace], None], add_arguments: Callable[[ArgumentParser], None] | None = None
) -> Callable[..., ArgumentParser]:
    def parser(subparsers: Any = None) -> ArgumentParser:
        """The parser of the command.

        Args:
            subparsers: what `ArgumentParser.add_subparsers` returned, for a parser inside another one.
        """
        command = find_command(name)
        if subparsers is None:
            epilog = "Options may be written with dashes as well, such as --num-processes."
            own_parser: ArgumentParser = OldParser(
                f"accelerate {name}", description=command.help, epilog=epilog, allow_abbrev=False
            )
        else:
            own_parser = subparsers.add_parser(name, help=command.help)
            own_parser.set_defaults(func=run)
        (add_arguments or command.add_arguments)(own_parser)
        return own_parser

    return parser


def _main_of(name: str) -> Callable[[], int]:
    def main() -> int:
        """What the console script and `python -m` run; returns the exit code."""
        return command_line.main([name, *sys.argv[1:]], prog="accelerate")

    return main


def main() -> int:
    """What the console script `accelerate` runs; returns the exit code."""
    return command_line.main(prog="accelerate")


def launch_command(args: Namespace) -> None:
    """Launch what was parsed.

    Raises:
        SystemExit: the run failed; the error has the exit code.
    """
    _runner("launch")(own_arguments(args))


def estimate_command(args: Namespace) -> None:
    """Estimate the memory of a model.

    Raises:
        NotFound: the Hub has no such model; `NoAccess` if access to the model is restricted.
        SettingError: the model cannot be built.
    """
    from accel_bigmodel.estimate import estimate_memory, table_of
    from accelerate.legacy.estimating import is_on_hub, model_of

    if not is_on_hub(args.model_name):
        _runner("estimate-memory")(args)
        return
    sys.stdout.write(table_of(estimate_memory(model_of(args), args.dtypes)) + "\n")


def tpu_command_launcher(args: Namespace) -> None:
    """Run commands on every machine of a TPU pod, or show the command line that does."""
    argv = command_line_of(args, package="accelerate")
    if args.debug:
        sys.stdout.write(f"Running {' '.join(argv)}\n")
    elif code := call(argv):
        sys.exit(code)


launch_command_parser = _parser_of("launch", launch_command, add_launch_arguments)
estimate_command_parser = _parser_of("estimate-memory", estimate_command)
to_fsdp2_command_parser = _parser_of("to-fsdp2", to_fsdp2_command)
tpu_command_parser = _parser_of("tpu-config", tpu_command_launcher)

launch_main, estimate_main, config_main = map(_main_of, ("launch", "estimate-memory", "config"))
env_main, merge_main, self_test_main = map(_main_of, ("env", "merge-weights", "test"))
tpu_main = _main_of("tpu-config")
