"""`accel doctor`: finds problems on this machine, or between the machines of a run, before the run starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from accel_state.errors import SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.doctor.examine import Finding
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("COMMAND", "Doctor")

_MAX_TIMEOUT_S: Final = 1_000_000


class Doctor:
    """Examines this machine, or connects to the others and compares them, and prints what is wrong."""

    help = "find problems of a run before it starts"
    examples = ("", "--nodes -- --config_file cluster.yaml")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options, and the arguments of the launch to check."""
        parser.usage = f"{parser.prog} [--nodes] [options] [-- launch arguments]"
        parser.add_argument(
            "--nodes",
            action="store_true",
            help="Check the connections between all machines; run the command on each of them.",
        )
        parser.add_argument(
            "--timeout",
            type=float,
            default=60.0,
            metavar="N",
            help="Seconds to wait for the other machines (default: 60).",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        parser.add_argument("launch", nargs="...", help="Arguments of `accel launch`, after --.")

    def run(self, arguments: Namespace) -> int:
        """Print the findings; the exit code is 1 if a run would not work."""
        from accel_cli.launch.request import request_of

        if not 0 <= arguments.timeout <= _MAX_TIMEOUT_S:
            raise SettingError(
                f"Cannot wait {arguments.timeout} seconds for the other machines.",
                f"The value must be from 0 to {_MAX_TIMEOUT_S}.",
                f"Set --timeout to a number from 0 to {_MAX_TIMEOUT_S}.",
            )
        request = request_of(arguments.launch[arguments.launch[:1] == ["--"] :], os.environ)
        findings = _nodes(request, arguments) if arguments.nodes else _here(request)
        if arguments.json:
            import json
            from dataclasses import asdict

            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            from accel_cli.doctor.examine import lines_of

            print("\n".join(lines_of(findings)))
        from accel_cli.doctor.examine import ERROR

        return int(any(finding.verdict == ERROR for finding in findings))


def _here(request: LaunchRequest) -> Sequence[Finding]:
    from accel_cli.doctor.examine import examine

    return list(examine(request))


def _nodes(request: LaunchRequest, arguments: Namespace) -> Sequence[Finding]:
    from accel_cli.doctor.examine import ERROR, examine_launch
    from accel_cli.doctor.nodes import meet_machines

    own = [finding for finding in examine_launch(request) if finding.verdict == ERROR]
    return [*own, *meet_machines(request, arguments.timeout)]


COMMAND: Final = Doctor()
