"""The functions by which scripts and libraries call the commands of the original: a parser, a command and a main each.

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


class OldCommand:
    """A command of `accelerate`.

    Args:
        name: its word on the command line.
        run: runs parsed arguments; by default the command of the same name does.
        add_arguments: declares the arguments; by default those of the command of the same name.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Namespace], None] | None = None,
        add_arguments: Callable[[ArgumentParser], None] | None = None,
    ) -> None:
        self._name, self._run, self._add_arguments = name, run or self.run, add_arguments

    def parser(self, subparsers: Any = None) -> ArgumentParser:
        """The parser of the command.

        Args:
            subparsers: what `ArgumentParser.add_subparsers` returned, for a parser inside another one.
        """
        command = find_command(self._name)
        if subparsers is None:
            epilog = "Options may be written with dashes as well, such as --num-processes."
            parser: ArgumentParser = OldParser(
                f"accelerate {self._name}", description=command.help, epilog=epilog, allow_abbrev=False
            )
        else:
            parser = subparsers.add_parser(self._name, help=command.help)
            parser.set_defaults(func=self._run)
        (self._add_arguments or command.add_arguments)(parser)
        return parser

    def run(self, args: Namespace) -> None:
        """Run the command.

        Raises:
            SystemExit: it failed; the error has the exit code.
        """
        code = find_command(self._name).run(args)
        if code != 0:
            sys.exit(code)

    def main(self) -> int:
        """What the console script and `python -m` run; returns the exit code."""
        return command_line.main([self._name, *sys.argv[1:]], prog="accelerate")


def main() -> int:
    """What the console script `accelerate` runs; returns the exit code."""
    return command_line.main(prog="accelerate")


def launch_command(args: Namespace) -> None:
    """Launch what was parsed.

    Raises:
        SystemExit: the run failed; the error has the exit code.
    """
    _launch.run(own_arguments(args))


def estimate_command(args: Namespace) -> None:
    """Estimate the memory of a model.

    Raises:
        NotFound: the Hub has no such model; `NoAccess` if access to the model is restricted.
        SettingError: the model cannot be built.
    """
    from accel_bigmodel.estimate import estimate_memory, table_of
    from accelerate.legacy.estimating import is_on_hub, model_of

    if not is_on_hub(args.model_name):
        _estimate.run(args)
        return
    sys.stdout.write(table_of(estimate_memory(model_of(args), args.dtypes)) + "\n")


def tpu_command_launcher(args: Namespace) -> None:
    """Run commands on every machine of a TPU pod, or show the command line that does."""
    argv = command_line_of(args, package="accelerate")
    if args.debug:
        sys.stdout.write(f"Running {' '.join(argv)}\n")
    elif code := call(argv):
        sys.exit(code)


_launch = OldCommand("launch", launch_command, add_launch_arguments)
_estimate = OldCommand("estimate-memory", estimate_command)
_config, _env, _merge, _test = map(OldCommand, ("config", "env", "merge-weights", "test"))
_to_fsdp2 = OldCommand("to-fsdp2", to_fsdp2_command)
_tpu = OldCommand("tpu-config", tpu_command_launcher)

launch_command_parser, launch_main = _launch.parser, _launch.main
estimate_command_parser, estimate_main = _estimate.parser, _estimate.main
config_command_parser, config_command, config_main = _config.parser, _config.run, _config.main
env_command_parser, env_command, env_main = _env.parser, _env.run, _env.main
merge_command_parser, merge_command, merge_main = _merge.parser, _merge.run, _merge.main
self_test_command_parser, self_test_command, self_test_main = _test.parser, _test.run, _test.main
to_fsdp2_command_parser = _to_fsdp2.parser
tpu_command_parser, tpu_main = _tpu.parser, _tpu.main
