"""How the processes of a check run a script: number, backend, axes and precision, as `accel launch` takes them."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from accel_state.errors import SettingError

__all__ = ("ProcessLaunch", "add_launch_options", "add_script", "axes_of", "launch_of", "read_numbers", "show_progress")

_AXIS_NAMES: Final = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


@dataclass(frozen=True)
class ProcessLaunch:
    """How processes run a script.

    Args:
        processes: the number of processes.
        backend: name of the backend, as `accel backends` lists it; if empty, the script's backend.
        axes: sizes of mesh axes by name, such as {"dp_shard": 2, "tp": 2}.
        mixed_precision: mixed precision of all runs; if empty, the script's.
        options: further options of `accel launch`.
        timeout: seconds after which a run is stopped.
    """

    processes: int = 2
    backend: str = ""
    axes: Mapping[str, int] = field(default_factory=dict)
    mixed_precision: str = ""
    options: tuple[str, ...] = ()
    timeout: float = 600.0

    def words(self) -> list[str]:
        """The options of `accel launch`."""
        words = ["--cpu", *(["--backend", self.backend] if self.backend else [])]
        words += ["--mixed_precision", self.mixed_precision] if self.mixed_precision else []
        if self.axes:
            words.append("--use_parallelism_config")
        for name, size in self.axes.items():
            words += [f"--parallelism_config_{name}_size", str(size)]
        if self.axes.get("sp", 1) > 1 and self.backend != "deepspeed":
            words += ["--parallelism_config_sp_backend", "torch"]
        return [*words, *self.options]

    def alone(self) -> ProcessLaunch:
        """One process in the same precision."""
        return ProcessLaunch(1, mixed_precision=self.mixed_precision, timeout=self.timeout)

    def environment(self, script: str) -> dict[str, str]:
        """The variables that `accel launch` would give to the processes of a script, without those of the rank.

        Raises:
            SettingError: an option is not one of `accel launch`, or has an invalid value.
        """
        from accel_cli.launch.launchers import load_launcher
        from accel_cli.launch.options import add_launch_arguments
        from accel_cli.launch.request import read_request

        parser = ArgumentParser(exit_on_error=False)
        add_launch_arguments(parser)
        arguments = parser.parse_args(["--num_processes", str(self.processes), *self.words(), script])
        request = read_request(arguments, os.environ)
        plan = load_launcher(request.launcher).plan(request)
        environment = {name: value for name, value in os.environ.items() if name not in plan.removed}
        return {**environment, **plan.environment}


def add_launch_options(parser: Any) -> None:
    """Declare the options of a launch, except the number of processes."""
    parser.add_argument("--backend", default="", help="Backend, as `accel backends` lists it.")
    parser.add_argument(
        "--axes",
        type=axes_of,
        default={},
        metavar="NAME=SIZE,...",
        help="Sizes of mesh axes, such as dp_shard=2,tp=2.",
    )
    parser.add_argument("--mixed_precision", default="", help="Mixed precision of the runs (no, fp16, bf16, fp8).")
    parser.add_argument(
        "--launch",
        default="",
        metavar="OPTIONS",
        help="Further options of `accel launch`, written as --launch='--use_fsdp --fsdp_version 2'.",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="Seconds after which a run is stopped (default: 600)."
    )


def add_script(parser: ArgumentParser) -> None:
    """Declare the script with its arguments, which end the line."""
    parser.add_argument("script", help="The training script.")
    parser.add_argument("script_arguments", nargs="...", help="Arguments of the script.")


def launch_of(arguments: Namespace, processes: int | None, default: int = 2) -> ProcessLaunch:
    """The launch that the options ask for.

    Args:
        arguments: the parsed options.
        processes: the number of processes; None for the product of the axes.
        default: the number of processes without axes.

    Raises:
        SettingError: the number is below 1.
    """
    count = prod(arguments.axes.values()) if arguments.axes else default
    count = count if processes is None else processes
    if count < 1:
        raise SettingError(
            f"Cannot check {count} processes.",
            "A run has at least one process.",
            "Give a number from 1 in --processes.",
        )
    options = tuple(shlex.split(arguments.launch))
    return ProcessLaunch(
        count, arguments.backend, arguments.axes, arguments.mixed_precision, options, arguments.timeout
    )


def axes_of(text: str) -> dict[str, int]:
    """Sizes of axes by name, from "dp_shard=2,tp=2".

    Raises:
        ArgumentTypeError: a name or a size is unknown.
    """
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        name = name.strip().removesuffix("_size")
        if name not in _AXIS_NAMES or not size.strip().isdigit():
            raise ArgumentTypeError(
                f"{part!r} is not an axis and its size, such as tp=2; the axes are {', '.join(_AXIS_NAMES)}"
            )
        sizes[name] = int(size)
    return sizes


def read_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers that are separated by commas, such as "3,7"."""
    return tuple(int(part) for part in text.split(","))


def show_progress(text: str) -> None:
    """Print a line about the progress of a check."""
    print(f"accel: {text}", file=sys.stderr, flush=True)  # noqa: T201 - progress of a command
