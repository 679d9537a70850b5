"""The plan of a launch as data, without starting anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accel_cli.command import find_command
from accel_cli.commands.launch import launch_request
from accel_cli.launch.check import check_launch
from accel_cli.launch.launcher import Launcher, LaunchPlan, LaunchRequest
from accel_cli.launch.launchers import choose_launcher, load_launcher
from accel_cli.launch.request import read_request, script_of
from accel_cli.parser import Parser

__all__ = ("make_plan", "prepare_launch")


def make_plan(request: LaunchRequest) -> LaunchPlan:
    """The plan of the launcher that a request calls for.

    Args:
        request: the settings, the script and the machine, whose variables may describe an allocation.

    Raises:
        SettingError: a setting cannot be used here; `Conflict` when two contradict each other.
        NotOffered: the launcher does not take what is to run.
    """
    check_launch(request.settings)
    manifest = choose_launcher(request.settings, request.machine.environ).manifest
    return load_launcher(manifest).plan(request)


def prepare_launch(words: Sequence[str], environ: Mapping[str, str]) -> tuple[Launcher, LaunchPlan]:
    """The launcher of a command line and its plan.

    Args:
        words: the arguments of `accel launch`.
        environ: the variables of the launch.

    Raises:
        AccelError: `accel launch` would refuse the command line.

    Example:
        >>> prepare_launch(["--launcher", "local", "--num_processes", "2", "train.py"], {})  # doctest: +SKIP
    """
    parser = Parser("accel launch")
    find_command("launch").add_arguments(parser)
    arguments = parser.parse_args(list(words))
    request = read_request(arguments, environ)
    launcher = load_launcher(request.launcher.manifest)
    return launcher, launcher.plan(launch_request(request, script_of(arguments)))
