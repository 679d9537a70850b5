"""`accel doctor`: what would go wrong in a run on this machine, or between the machines of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.doctor.finding import Finding
    from accel_cli.launch.request import Request

__all__ = ("COMMAND", "Doctor")

# Settings that differ from machine to machine by their nature.
_PARTICULAR: Final = ("machine_rank", "main_process_ip", "gpu_ids", "device", "log_dir", "num_cpu_threads_per_process")

_COMPARED: Final = ("torch", "accel-state", "accel-ops", "accel-data", "accel-plugins", "accel-cli", "accel-torch")


class Doctor:
    """The command; see `accel_cli.command.Command`."""

    help = "find what would go wrong in a run, before it starts"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Whether to look at this machine or at all of them, and the arguments of the launch that is meant."""
        parser.usage = f"{parser.prog} [--nodes] [options] [-- launch arguments]"
        parser.add_argument("--nodes", action="store_true", help="Meet the other machines; run it on each of them.")
        parser.add_argument("--timeout", type=float, default=60.0, metavar="N", help="Seconds to wait for them.")
        parser.add_argument(*spelled("--shared_folder"), metavar="PATH", help="A folder that all machines should see.")
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        parser.add_argument("launch", nargs="...", help="After --, what `accel launch` would be given.")

    def run(self, arguments: Namespace) -> int:
        """Print the findings; the exit code is 1 when a run would not work."""
        from accel_cli.launch.request import request_of

        request = request_of(arguments.launch[arguments.launch[:1] == ["--"] :], os.environ)
        findings = _nodes(request, arguments) if arguments.nodes else _here(request)
        if arguments.json:
            import json
            from dataclasses import asdict

            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            print("\n".join(_lines(findings)))
        from accel_cli.doctor.finding import TROUBLE

        return int(any(finding.verdict == TROUBLE for finding in findings))


def _here(request: Request) -> Sequence[Finding]:
    from accel_cli.doctor.examine import examine

    return list(examine(request))


def _nodes(request: Request, arguments: Namespace) -> Sequence[Finding]:
    import socket

    from accel_cli.distributions import versions
    from accel_cli.doctor.compare import Member
    from accel_cli.doctor.nodes import Meeting, meet
    from accel_cli.launch.arguments import MachineSettings
    from accel_cli.launch.check import check_launch, check_own_launcher
    from accel_cli.launch.torchrun import PORT_OF_MACHINES

    check_launch(request.settings)
    check_own_launcher(request.settings)
    machines = request.settings.instance(MachineSettings)
    if machines.num_machines < 2 or machines.main_process_ip is None:
        raise SettingError(
            "The machines of a run were to meet.",
            "The launch that is meant takes place on one machine.",
            "Give its arguments: accel doctor --nodes -- --num_machines 2 --machine_rank 0 --main_process_ip ADDRESS",
        )
    told = {
        name: str(effect.value)
        for name, effect in request.settings.items()
        if name not in _PARTICULAR and effect.value is not None
    }
    port = machines.main_process_port or PORT_OF_MACHINES
    meeting = Meeting(machines.main_process_ip, port, machines.num_machines, arguments.timeout, arguments.shared_folder)
    return meet(meeting, Member(machines.machine_rank, socket.gethostname(), versions(_COMPARED), told))


def _lines(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<7}  {finding.subject:<{width}}  {finding.told}")
        if finding.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {finding.remedy}")
    return lines


COMMAND: Final = Doctor()
