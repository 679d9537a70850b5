"""Connects the machines before a run: the main machine collects data from all and sends the findings to all.

Their messages are lines of JSON, in this order:

    main machine                              every other machine
    listens on the port of the run     <--    its rank, host, versions, settings, and its own port
    all hosts and ports                -->    connects to all others
                                       <--    the machines that it could not connect to
    all findings                       -->    the same report on every machine
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from io import BufferedIOBase, BytesIO
from typing import Any, Final, NamedTuple

from accel_cli.distributions import versions
from accel_cli.doctor.examine import ERROR, OK, WARNING, Finding, lines_of
from accel_cli.launch.addresses import is_own_address
from accel_cli.launch.request import LaunchRequest
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import LaunchError, SettingError
from accel_state.network import DEFAULT_PORT
from accel_state.untrusted import Shape, dict_of, integer, list_of, parse_json, printable, record, text

__all__ = ("Meeting", "Member", "clear_for_launch", "compare", "connect", "listen", "meet", "meet_machines", "receive")

_LONGEST_MESSAGE: Final = 2**20
_DEEPEST_MESSAGE: Final = 8
_RETRY_PAUSE_S: Final = 0.2
_CONNECTION_TIMEOUT_S: Final = 5.0
_LAUNCH_TIMEOUT_S: Final = 120.0
"""How long a launch waits for the other machines."""

_NAMES: Final = dict_of(text())
_MEMBER: Final = record({"rank": integer(), "host": text(), "versions": _NAMES, "settings": _NAMES})
_OF_HELLO: Final = ("rank", "host", "versions", "settings")
_HELLO: Final = record({"member": _MEMBER, "listener": integer(1, 65535)})
_PLACE: Final = record({"rank": integer(), "host": text(), "port": integer(1, 65535)})
_UNREACHABLE: Final = dict_of(text(), text("[0-9]{1,9}"))
_FIELDS: Final = ("subject", "verdict", "told", "remedy")
_FINDINGS: Final = list_of(record(dict.fromkeys(_FIELDS, text())))

_OWN_OF_MACHINE: Final = (
    "machine_rank",
    "main_process_ip",
    "gpu_ids",
    "device",
    "log_dir",
    "num_cpu_threads_per_process",
)
"""Settings that are different on each machine."""

_COMPARED: Final = ("torch", "accel-state", "accel-ops", "accel-data", "accel-plugins", "accel-cli", "accel-torch")


@dataclass(frozen=True)
class Member:
    """One machine of the run.

    Args:
        rank: the rank that it reports.
        host: its host name.
        versions: version of each package that must be the same on all machines.
        settings: text of each setting that must be the same on all machines.
        unreachable: ranks of machines that it could not connect to, with the reason.
    """

    rank: int
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    unreachable: Mapping[int, str] = field(default_factory=dict)


class Meeting(NamedTuple):
    """Where the machines connect, and for how long they wait.

    Args:
        host: address of the main machine.
        port: port of the run.
        machines: number of machines.
        timeout: seconds to wait for them.
    """

    host: str
    port: int
    machines: int
    timeout: float


def compare(members: Sequence[Member], machines: int, waited: float) -> list[Finding]:
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
            told = f"{member.host} cannot connect to {hosts.get(rank, f'machine {rank}')}: {reason}."
            findings.append(Finding("network", ERROR, told, remedy))
    agreed = f"all {machines} machines are connected and have the same versions and settings"
    return findings or [Finding("machines", OK, agreed)]


def _wrong_ranks(members: Sequence[Member], machines: int, waited: float) -> Iterator[Finding]:
    by_rank: dict[int, list[str]] = {}
    for member in members:
        by_rank.setdefault(member.rank, []).append(member.host)
    for rank, hosts in sorted(by_rank.items()):
        if len(hosts) > 1:
            told = f"{' and '.join(hosts)} all have the rank {rank}."
            yield Finding("machine ranks", ERROR, told, "Set a different --machine_rank on each machine.")
        if rank >= machines:
            told = f"{hosts[0]} has the rank {rank}, but there are {machines} machines, with ranks from 0."
            yield Finding("machine ranks", ERROR, told, "Set the same --num_machines on every machine.")
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
                told = f"{name} is {here} on {main.host} and {there} on {member.host}."
                yield Finding(subject, verdict, told, remedy)


def meet(meeting: Meeting, me: Member) -> list[Finding]:
    """Connect to the other machines, and return the problems between them.

    Raises:
        LaunchError: the port is in use, or the main machine cannot be reached.
    """
    with listen(0) as listener:
        # A second machine with rank 0 joins as a peer, so that the finding names both.
        part = _serve if me.rank == 0 and is_own_address(meeting.host) else _join
        return part(meeting, me, listener.getsockname()[1])


class _Peer(NamedTuple):
    """The main machine's end of a connection to another one."""

    line: socket.socket
    file: BufferedIOBase
    member: Member
    place: Mapping[str, Any]


def _serve(meeting: Meeting, me: Member, listener: int) -> list[Finding]:
    with ExitStack() as stack:
        try:
            server = stack.enter_context(listen(meeting.port))
        except OSError as error:
            remedy = "Set another --main_process_port."
            failed = f"Cannot accept the other machines on port {meeting.port}."
            raise LaunchError(failed, f"The port cannot be used: {error}.", remedy) from None
        peers = _arrivals(server, meeting, stack)
        roster = [{"rank": me.rank, "host": meeting.host, "port": listener}, *(peer.place for peer in peers)]
        for peer in peers:
            stack.enter_context(peer.file)
            _try_to_send(peer.line, roster)
        members = [replace(me, unreachable=_unreachable(me.rank, roster)), *map(_with_answer, peers)]
        findings = compare(members, meeting.machines, meeting.timeout)
        for peer in peers:
            _try_to_send(peer.line, [asdict(finding) for finding in findings])
    return findings


def _arrivals(server: socket.socket, meeting: Meeting, stack: ExitStack) -> list[_Peer]:
    """The machines that connected before the deadline; return early once the expected number has connected.

    A connection may be from another program, such as a port scanner, which says nothing or something else.
    """
    deadline = time.monotonic() + meeting.timeout
    peers: list[_Peer] = []
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(peers) < meeting.machines - 1 and (left := deadline - time.monotonic()) > 0:
            key, _ = next(iter(selector.select(left)), (None, 0))
            if key is not None and key.data is None:
                line, address = server.accept()
                stack.enter_context(line).setblocking(False)
                selector.register(line, selectors.EVENT_READ, (line, address[0], bytearray()))
            elif key is not None and _has_spoken(*key.data):
                selector.unregister(key.fileobj)
                line, host, said = key.data
                peers += _peer(line, host, said, _patience(meeting.machines))
    return peers


def _has_spoken(line: socket.socket, host: str, said: bytearray) -> bool:
    """Read what has arrived; whether the message is complete, or will never be."""
    try:
        chunk = line.recv(_LONGEST_MESSAGE)
    except OSError:
        chunk = b""
    said += chunk
    return not chunk or said.endswith(b"\n") or len(said) > _LONGEST_MESSAGE


def _peer(line: socket.socket, host: str, said: bytearray, patience: float) -> Iterator[_Peer]:
    """The machine that said this, if it is one."""
    try:
        hello = receive(BytesIO(said), _HELLO)
    except (OSError, ValueError):
        line.close()
        return
    line.settimeout(patience)
    place = {"rank": hello["member"]["rank"], "host": host, "port": hello["listener"]}
    member = Member(**{name: hello["member"][name] for name in _OF_HELLO})
    yield _Peer(line, line.makefile("rb"), member, place)


def _with_answer(peer: _Peer) -> Member:
    """The machine with the others that it cannot reach."""
    try:
        unreachable = {int(rank): reason for rank, reason in receive(peer.file, _UNREACHABLE).items()}
    except (OSError, ValueError) as error:
        unreachable = {0: f"it disconnected ({error})"}
    return replace(peer.member, unreachable=unreachable)


def _join(meeting: Meeting, me: Member, listener: int) -> list[Finding]:
    deadline = time.monotonic() + meeting.timeout
    try:
        with connect(meeting.host, meeting.port, deadline) as line, line.makefile("rb") as file:
            _send(line, {"member": asdict(me), "listener": listener})
            line.settimeout(max(deadline - time.monotonic(), 0.0) + _patience(meeting.machines))
            roster = receive(file, list_of(_PLACE, meeting.machines))
            _send(line, _unreachable(me.rank, roster))
            return [Finding(*map(finding.get, _FIELDS)) for finding in receive(file, _FINDINGS)]
    except (OSError, ValueError) as error:
        remedy = "Check the address, that no firewall blocks the port, and that `accel doctor --nodes` runs there."
        failed = f"Cannot connect to the main machine at {meeting.host}:{meeting.port}."
        raise LaunchError(failed, f"The connection failed: {printable(error)}.", remedy) from None


def _unreachable(rank: int, roster: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The machines that this one cannot connect to, with the reason."""
    reasons: dict[int, str] = {}
    for place in roster:
        if place["rank"] != rank:
            try:
                connect(place["host"], place["port"], time.monotonic() + _CONNECTION_TIMEOUT_S).close()
            except (OSError, ValueError) as error:
                reasons[place["rank"]] = str(error)
    return reasons


def _patience(machines: int) -> float:
    """Seconds that so many machines may need to connect to each other."""
    return _CONNECTION_TIMEOUT_S * (2 * machines + 2)


def _send(line: socket.socket, message: Any) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def _try_to_send(line: socket.socket, message: Any) -> None:
    """Send a message to a machine that may be gone; then it gives no answer, which is a finding."""
    try:
        _send(line, message)
    except OSError:
        return


def receive(file: BufferedIOBase, shape: Shape) -> Any:
    """Receive the next message and check its structure.

    Raises:
        OSError: no message arrived in time, the connection was closed, or the message is too long.
        ValueError: the message has another structure.
    """
    line = file.readline(_LONGEST_MESSAGE)
    if not line.endswith(b"\n"):
        too_long = len(line) == _LONGEST_MESSAGE
        raise ConnectionError("the answer is too long" if too_long else "the connection was closed")
    return parse_json(line, shape, depth=_DEEPEST_MESSAGE)


def listen(port: int) -> socket.socket:
    """A listening socket on all addresses; port 0 selects a free one.

    Raises:
        OSError: the port cannot be used.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect, and retry while the other side does not listen yet.

    Args:
        deadline: time until which to retry, by `time.monotonic()`.

    Raises:
        OSError: it did not listen before the deadline.
        ValueError: this is not a valid host name.
    """
    while True:
        patience = min(deadline - time.monotonic(), _CONNECTION_TIMEOUT_S)
        try:
            return socket.create_connection((host, port), timeout=max(patience, 0.01))
        except (OSError, ValueError):
            if time.monotonic() + _RETRY_PAUSE_S >= deadline:
                raise
        time.sleep(_RETRY_PAUSE_S)


def meet_machines(request: LaunchRequest, timeout: float) -> Sequence[Finding]:
    """Connect to the other machines of a launch, and return the problems between them.

    Raises:
        SettingError: the launch uses only one machine.
        LaunchError: the main machine cannot be reached, or its port is in use.
    """
    request.check()
    machines = request.settings.instance(MachineSettings)
    if machines.num_machines < 2 or machines.main_process_ip is None:
        raise SettingError(
            "Cannot connect the machines of a run.",
            "The launch uses only one machine.",
            "Add the arguments of the launch: accel doctor --nodes -- --num_machines 2 --machine_rank 0 "
            "--main_process_ip ADDRESS",
        )
    settings = {
        name: str(effect.value)
        for name, effect in request.settings.items()
        if name not in _OWN_OF_MACHINE and effect.value is not None
    }
    port = machines.main_process_port or DEFAULT_PORT
    meeting = Meeting(machines.main_process_ip, port, machines.num_machines, timeout)
    return meet(meeting, Member(machines.machine_rank, socket.gethostname(), versions(_COMPARED), settings))


def clear_for_launch(request: LaunchRequest) -> None:
    """Connect the machines if there are several and `--preflight` is set.

    Raises:
        LaunchError: a run would fail, or the machines did not connect in time.
    """
    if not request.settings["preflight"].value or request.settings["num_machines"].value < 2:
        return
    findings = meet_machines(request, _LAUNCH_TIMEOUT_S)
    if any(finding.verdict == ERROR for finding in findings):
        raise LaunchError(
            "Cannot launch: --preflight found problems between the machines.",
            "\n  ".join(lines_of(findings)),
            "No process was started. Correct the problems, or remove --preflight to start anyway.",
        )
