"""Checks the machines of a run: reachability, ranks, versions and settings.

Run `accel doctor --nodes -- <launch arguments>` on each machine. `accel_cli.doctor.meeting` connects them, in a process
that imports torch, and every machine compares the same members, so that all print the same report.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from accel_cli.config.resolved import label
from accel_cli.doctor.examine import ERROR, OK, WARNING, Finding, lines_of
from accel_cli.doctor.meeting import CONNECTION_TIMEOUT_S
from accel_cli.launch.addresses import is_own_address
from accel_cli.launch.interface import LaunchRequest
from accel_cli.launch.request import check_request
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import LaunchError, SettingError
from accel_state.network import DEFAULT_PORT
from accel_state.settings.installed import installed_version
from accel_state.untrusted import dict_of, integer, list_of, parse_json, printable, record, text

__all__ = ("Member", "clear_for_launch", "compare_members", "meet", "meet_machines")

_MEETING_SCRIPT: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "meeting.py")
_MEETING_TIMEOUT_S: Final = 120.0
"""How long a launch waits for the other machines, and how long importing torch may take."""

_FACT_SHAPES: Final = {"rank": integer(), "host": text(), "versions": dict_of(text()), "settings": dict_of(text())}
_PLACE_SHAPES: Final = {
    "address": text(),
    "port": integer(1, 65535),
    "unreachable": dict_of(text(), text("[0-9]{1,9}")),
}
_MEETING_SHAPE: Final = record({"error": text(), "members": list_of(record({**_FACT_SHAPES, **_PLACE_SHAPES}))})

_MACHINE_SETTINGS: Final = (
    "machine_rank",
    "main_process_ip",
    "gpu_ids",
    "device",
    "log_dir",
    "num_cpu_threads_per_process",
)
"""Settings that are different on each machine."""

_COMPARED_PACKAGES: Final = (
    "torch",
    "accel-state",
    "accel-ops",
    "accel-data",
    "accel-plugins",
    "accel-cli",
    "accel-torch",
)


class Member(NamedTuple):
    """One machine of the run.

    Args:
        rank: the rank that it reports.
        host: its host name.
        versions: version of each package that must be the same on all machines.
        settings: text of each setting that must be the same on all machines.
        unreachable: ranks of the machines that it could not connect to, with the reason.
    """

    rank: int
    host: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    unreachable: Mapping[str, str] = MappingProxyType({})


def compare_members(members: Sequence[Member], machines: int, waited: float) -> list[Finding]:
    """Find the problems between the machines; without any, return a single finding with the verdict `OK`.

    Args:
        members: the machines that connected, the main one first.
        machines: the expected number of machines.
        waited: seconds that the main machine waited for them.
    """
    findings = [*_wrong_ranks(members, machines, waited)]
    for member in members:
        findings += _differences(members[0], member)
    hosts = {member.rank: member.host for member in members}
    remedy = "Open all ports between the machines in the firewall: every process connects to others."
    for member in members:
        for rank, reason in sorted(member.unreachable.items()):
            message = f"{member.host} cannot connect to {hosts.get(int(rank), f'machine {rank}')}: {reason}."
            findings.append(Finding("network", ERROR, message, remedy))
    agreed = f"all {machines} machines are connected and have the same versions and settings"
    return findings or [Finding("machines", OK, agreed)]


def _wrong_ranks(members: Sequence[Member], machines: int, waited: float) -> Iterator[Finding]:
    by_rank: dict[int, list[str]] = {}
    for member in members:
        by_rank.setdefault(member.rank, []).append(member.host)
    for rank, hosts in sorted(by_rank.items()):
        if len(hosts) > 1:
            message = f"{' and '.join(hosts)} all have the rank {rank}."
            yield Finding("machine ranks", ERROR, message, "Set a different --machine_rank on each machine.")
        if rank >= machines:
            message = f"{hosts[0]} has the rank {rank}, but there are {machines} machines, with ranks from 0."
            yield Finding("machine ranks", ERROR, message, "Set the same --num_machines on every machine.")
    remedy = "Start `accel doctor --nodes` there too, and check that it reaches the main machine's address and port."
    for rank in sorted(set(range(machines)) - set(by_rank)):
        yield Finding("machine ranks", ERROR, f"Machine {rank} did not connect within {waited:.0f} s.", remedy)


def _differences(main: Member, member: Member) -> Iterator[Finding]:
    """Differences between a machine and the main one."""
    for subject, verdict, one, other, remedy in (
        ("versions", WARNING, main.versions, member.versions, "Install the same version on every machine."),
        ("settings", ERROR, main.settings, member.settings, "Use the same config file and options on every machine."),
    ):
        for name in sorted({*one, *other}):
            here, there = one.get(name, "absent"), other.get(name, "absent")
            if here != there:
                message = f"{name} is {here} on {main.host} and {there} on {member.host}."
                yield Finding(subject, verdict, message, remedy)


def meet(
    host: str,
    port: int,
    machines: int,
    timeout: float,
    me: Member,
    connection_timeout: float = CONNECTION_TIMEOUT_S,
) -> list[Finding]:
    """Connect to the other machines, and return the problems between them.

    Args:
        host: address of the main machine.
        port: port of the run.
        machines: number of machines.
        timeout: seconds to wait for them.
        me: this machine.
        connection_timeout: seconds within which one machine must accept a connection of another.

    Raises:
        LaunchError: the port is in use, or the main machine cannot be reached.
    """
    import json

    # A second machine with rank 0 joins as a client, so that the finding names both.
    serves = me.rank == 0 and is_own_address(host)
    place = {"host": host, "port": port, "machines": machines, "serves": serves}
    meeting = {**place, "timeout": timeout, "connection_timeout": connection_timeout}
    done = subprocess.run(
        [sys.executable, _MEETING_SCRIPT],
        input=json.dumps({**meeting, "member": {name: getattr(me, name) for name in _FACT_SHAPES}}),
        capture_output=True,
        text=True,
        timeout=timeout + _MEETING_TIMEOUT_S + connection_timeout * (2 * machines + 2) * (machines + 1),
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    answer = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        met = parse_json(answer, _MEETING_SHAPE)
    except ValueError as error:
        reason = (done.stderr.strip().splitlines() or [str(error)])[-1]
        remedy = "Run the same version of this program on every machine."
        raise LaunchError("Cannot read what the machines sent.", f"{printable(reason)}.", remedy) from None
    if not met["error"]:
        members = [Member(**{name: one[name] for name in (*_FACT_SHAPES, "unreachable")}) for one in met["members"]]
        # The main machine is the first in every report.
        return compare_members(sorted(members, key=lambda one: one.rank), machines, timeout)
    failure = f"Cannot connect to the main machine at {host}:{port}."
    remedy = "Check the address, that no firewall blocks the port, and that `accel doctor --nodes` runs there."
    if serves:
        failure, remedy = f"Cannot use the port {port} for the other machines.", "Set another --main_process_port."
    raise LaunchError(failure, f"{printable(met['error'])}.", remedy)


def meet_machines(request: LaunchRequest, timeout: float) -> Sequence[Finding]:
    """Connect to the other machines of a launch, and return the problems between them.

    Raises:
        SettingError: the launch uses only one machine.
        LaunchError: the main machine cannot be reached, or its port is in use.
    """
    check_request(request)
    machines = request.settings.instance(MachineSettings)
    if machines.num_machines < 2 or machines.main_process_ip is None:
        raise SettingError(
            "Cannot connect the machines of a run.",
            "The launch uses only one machine.",
            "Add the arguments of the launch: accel doctor --nodes -- --num_machines 2 --machine_rank 0 "
            "--main_process_ip ADDRESS",
        )
    shared = (effect for name, effect in request.settings.items() if name not in _MACHINE_SETTINGS)
    settings = {label(effect.definition): str(effect.value) for effect in shared if effect.value is not None}
    port = machines.main_process_port or DEFAULT_PORT
    versions = {name: version for name in _COMPARED_PACKAGES if (version := installed_version(name)) is not None}
    me = Member(machines.machine_rank, socket.gethostname(), versions, settings)
    return meet(machines.main_process_ip, port, machines.num_machines, timeout, me)


def clear_for_launch(request: LaunchRequest) -> None:
    """Connect the machines of a launch, if there are several.

    Raises:
        LaunchError: a run would fail, or the machines did not connect in time.
    """
    if request.settings["num_machines"].value < 2:
        return
    findings = meet_machines(request, _MEETING_TIMEOUT_S)
    if any(finding.verdict == ERROR for finding in findings):
        raise LaunchError(
            "Cannot launch: --preflight found problems between the machines.",
            "\n  ".join(lines_of(findings)),
            "No process was started. Correct the problems, or remove --preflight to start anyway.",
        )
