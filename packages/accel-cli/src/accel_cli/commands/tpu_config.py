"""`accel tpu-config`: run commands on every machine of a TPU pod, to set it up before a launch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_state.errors import Missing, NotFound, SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "TPUConfig", "call", "command_line_of", "pod_command")

_TPU_FAILURE: Final = "Cannot set up the machines of a TPU pod."
_DEFAULT_PACKAGE: Final = "accel-torch"


class TPUConfig:
    """Runs commands through gcloud, or prints the command line."""

    help = "run commands on every machine of a TPU pod"
    examples = (
        '--tpu_name pod --tpu_zone us-central2-b --command "pip list"',
        "--tpu_name pod --tpu_zone us-central2-b --command_file setup.sh",
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the pod and the commands; missing values are read from the config file."""
        add = parser.add_argument
        add(
            *spelled("--config_file"),
            metavar="PATH",
            help="Config file; by default the one that `accel config` writes.",
        )
        add(*spelled("--tpu_name"), metavar="TEXT", help="Name of the TPU; by default tpu_name of the config file.")
        add(*spelled("--tpu_zone"), metavar="TEXT", help="Zone of the TPU; by default tpu_zone of the config file.")
        add(*spelled("--use_alpha"), action="store_true", help="Use `gcloud alpha`.")
        add(*spelled("--command_file"), metavar="PATH", help="File with one command per line.")
        add(
            "--command",
            action="append",
            nargs="+",
            metavar="TEXT",
            help="Commands to run on each machine; may be repeated.",
        )
        add(*spelled("--install_accelerate"), action="store_true", help="Install accelerate on the machines first.")
        add(
            *spelled("--accelerate_version"),
            default="latest",
            metavar="TEXT",
            help="Version to install: a version number, latest or dev.",
        )
        add("--debug", action="store_true", help="Print the commands without running them.")

    def run(self, arguments: Namespace) -> int:
        """Run the commands and return the exit code of gcloud."""
        argv = command_line_of(arguments)
        if arguments.debug:
            print(shlex.join(argv))
            return 0
        return call(argv)


def command_line_of(arguments: Namespace, package: str = _DEFAULT_PACKAGE) -> tuple[str, ...]:
    """The command line of gcloud that the arguments and the config file describe.

    Args:
        arguments: the parsed command line.
        package: what `--install_accelerate` installs on the machines.

    Raises:
        SettingError: the TPU, its zone or the commands are missing.
        NotFound: the config file or the file with commands does not exist.
    """
    from accel_cli.launch.request import request_of
    from accel_cli.launch.tpu import TPUSettings

    settings = request_of([], os.environ, arguments.config_file).settings.instance(TPUSettings)
    own_commands = [command for commands in arguments.command or () for command in commands]
    commands = own_commands or _lines(arguments.command_file or settings.command_file) or settings.commands
    if arguments.install_accelerate:
        commands = [_install(package, arguments.accelerate_version), *commands]
    return pod_command(
        arguments.tpu_name or settings.tpu_name,
        arguments.tpu_zone or settings.tpu_zone,
        commands,
        arguments.use_alpha,
    )


def pod_command(name: str | None, zone: str | None, commands: Sequence[str], alpha: bool = False) -> tuple[str, ...]:
    """The command line of gcloud that runs commands on every machine of a pod.

    Raises:
        SettingError: the TPU, its zone or the commands are missing.
    """
    missing = [
        flag for value, flag in ((name, "--tpu_name"), (zone, "--tpu_zone"), (commands, "--command")) if not value
    ]
    if missing:
        obstacle = f"Missing {', '.join(missing)}: not on the command line, and not in the config file."
        raise SettingError(_TPU_FAILURE, obstacle, f"Set {' and '.join(missing)}.")
    return (
        "gcloud",
        *(("alpha",) if alpha else ()),
        *("compute", "tpus", "tpu-vm", "ssh", str(name), "--zone", str(zone)),
        *("--command", "; ".join(["cd /usr/share", *commands]), "--worker", "all"),
    )


def _lines(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except FileNotFoundError:
        raise NotFound(_TPU_FAILURE, f"The file {path} does not exist.", "Check the path.") from None
    except (OSError, ValueError) as error:
        raise SettingError(
            _TPU_FAILURE, f"{path} cannot be read: {error}.", "Give a text file with one command per line."
        ) from None


def _install(package: str, version: str) -> str:
    wanted = {"latest": f"{package} -U", "dev": f"{package} -U --pre"}.get(version, f"{package}=={version}")
    return f"pip install {wanted}"


def call(argv: Sequence[str]) -> int:
    """Run a command line of gcloud and return its exit code.

    Raises:
        Missing: gcloud is not installed.
    """
    import subprocess

    try:
        return subprocess.call(argv)
    except FileNotFoundError:
        remedy = "Install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
        raise Missing(_TPU_FAILURE, "The program `gcloud` is not on the path.", remedy) from None


COMMAND: Final = TPUConfig()
