"""Compares what machines report about themselves and each other: a pure function from facts to findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from accel_cli.doctor.finding import FINE, TROUBLE, WORRY, Finding

__all__ = ("Member", "compare")

_LARGEST_CLOCK_DIFFERENCE: Final = 2.0


@dataclass(frozen=True)
class Member:
    """One machine of the run.

    Args:
        rank: which one it says it is.
        host: its name.
        versions: version of each package that has to agree.
        settings: text of each setting that has to agree.
        clock: seconds by which its clock is ahead of the main machine's.
        unreachable: ranks of machines it could not connect to, with the reason.
        shares_folder: whether it sees what the main machine wrote into the shared folder; None without one.
    """

    rank: int
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    clock: float = 0.0
    unreachable: Mapping[int, str] = field(default_factory=dict)
    shares_folder: bool | None = None


def compare(members: Sequence[Member], machines: int, waited: float) -> list[Finding]:
    """What is wrong between the machines; a single fine finding when nothing is.

    Args:
        members: the machines that came, the main one first.
        machines: how many should have come.
        waited: for how many seconds they were waited for.
    """
    checks = (_ranks(members, machines, waited), _differences(members), _clocks(members), _links(members))
    found = [finding for check in (*checks, _folders(members)) for finding in check]
    return found or [Finding("machines", FINE, f"all {machines} are there, agree and reach each other")]


def _ranks(members: Sequence[Member], machines: int, waited: float) -> Iterator[Finding]:
    by_rank: dict[int, list[str]] = {}
    for member in members:
        by_rank.setdefault(member.rank, []).append(member.host)
    for rank, hosts in sorted(by_rank.items()):
        if len(hosts) > 1:
            told = f"{' and '.join(hosts)} all say that they are machine {rank}."
            yield Finding("machine ranks", TROUBLE, told, "Give each machine its own --machine_rank.")
        if rank >= machines:
            told = f"{hosts[0]} says that it is machine {rank} of {machines}."
            yield Finding("machine ranks", TROUBLE, told, "Give the same --num_machines everywhere.")
    for rank in sorted(set(range(machines)) - set(by_rank)):
        told = f"Machine {rank} did not come within {waited:.0f} s."
        remedy = (
            "Start `accel doctor --nodes` there too, and check that it reaches the main machine's address and port."
        )
        yield Finding("machine ranks", TROUBLE, told, remedy)


def _differences(members: Sequence[Member]) -> Iterator[Finding]:
    main = members[0]
    for member in members[1:]:
        for name, version in _differing(main.versions, member.versions):
            told = f"{name} is {version[0]} on {main.host} and {version[1]} on {member.host}."
            yield Finding("versions", WORRY, told, "Install the same version everywhere.")
        for name, value in _differing(main.settings, member.settings):
            told = f"{name} is {value[0]} on {main.host} and {value[1]} on {member.host}."
            yield Finding("settings", TROUBLE, told, "Use the same config file and options everywhere.")


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    for name in sorted({*one, *other}):
        pair = one.get(name, "absent"), other.get(name, "absent")
        if pair[0] != pair[1]:
            yield name, pair


def _clocks(members: Sequence[Member]) -> Iterator[Finding]:
    for member in members:
        if abs(member.clock) > _LARGEST_CLOCK_DIFFERENCE:
            told = f"The clock of {member.host} differs from that of {members[0].host} by {member.clock:+.1f} s."
            remedy = "Set the clocks by NTP: the times in logs and checkpoints would mislead."
            yield Finding("clocks", WORRY, told, remedy)


def _links(members: Sequence[Member]) -> Iterator[Finding]:
    hosts = {member.rank: member.host for member in members}
    for member in members:
        for rank, reason in sorted(member.unreachable.items()):
            told = f"{member.host} cannot connect to {hosts.get(rank, f'machine {rank}')}: {reason}."
            yield Finding(
                "network", TROUBLE, told, "Open the ports between the machines: every process connects to others."
            )


def _folders(members: Sequence[Member]) -> Iterator[Finding]:
    apart: list[Any] = [member.host for member in members if member.shares_folder is False]
    if apart:
        told = f"{', '.join(apart)} do not see what {members[0].host} writes into the shared folder."
        yield Finding("shared folder", TROUBLE, told, "Mount the same file system at the same path everywhere.")
