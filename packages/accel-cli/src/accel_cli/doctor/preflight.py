"""The machines of a run meet before it starts, as `accel doctor --nodes` and `accel launch --preflight` let them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from accel_cli.distributions import versions
from accel_cli.doctor.compare import Member
from accel_cli.doctor.finding import TROUBLE, Finding, lines_of
from accel_cli.doctor.nodes import Meeting, meet
from accel_cli.launch.arguments import MachineSettings
from accel_cli.launch.check import check_launch, check_own_launcher
from accel_cli.launch.request import Request
from accel_state.errors import LaunchError, SettingError
from accel_state.network import DEFAULT_PORT

__all__ = ("clear_for_launch", "meet_machines")

# Settings that differ from machine to machine by their nature.
_PARTICULAR: Final = ("machine_rank", "main_process_ip", "gpu_ids", "device", "log_dir", "num_cpu_threads_per_process")

_COMPARED: Final = ("torch", "accel-state", "accel-ops", "accel-data", "accel-plugins", "accel-cli", "accel-torch")

_PATIENCE: Final = 120.0
"""Seconds for which a launch waits for the other machines."""


def meet_machines(request: Request, timeout: float, shared_folder: str | None) -> Sequence[Finding]:
    """Meet the other machines of a launch and return what is wrong between them.

    Raises:
        SettingError: the launch takes place on one machine.
        LaunchError: the main machine was not reached, or its port is in use.
    """
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
    port = machines.main_process_port or DEFAULT_PORT
    meeting = Meeting(machines.main_process_ip, port, machines.num_machines, timeout, shared_folder)
    return meet(meeting, Member(machines.machine_rank, socket.gethostname(), versions(_COMPARED), told))


def clear_for_launch(request: Request) -> None:
    """Connect the machines if there are several and `--preflight` is set.

    Raises:
        LaunchError: a run would not work, or the machines did not meet in time.
    """
    if not request.settings["preflight"].value or request.settings["num_machines"].value < 2:
        return
    findings = meet_machines(request, _PATIENCE, None)
    if any(finding.verdict == TROUBLE for finding in findings):
        raise LaunchError(
            "The machines met before the launch (--preflight).",
            "\n  ".join(lines_of(findings)),
            "Nothing was started. Correct it, or leave out --preflight to start all the same.",
        )
