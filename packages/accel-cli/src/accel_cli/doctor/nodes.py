"""Connects the machines before a run: the main machine collects data from all and sends the findings to all.

Their messages are lines of JSON, in this order:

    main machine                              every other machine
    listens on the port of the run     <--    hello: rank, host, versions, settings, its time, its own port
    all hosts, token of the folder     -->    connects to all others, reads the shared folder
                                       <--    its findings
    all findings                       -->    the same report on every machine
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, field, replace
from io import BufferedIOBase
from typing import Any, Final

from accel_cli.distributions import versions
from accel_cli.doctor.examine import ERROR, OK, WARNING, Finding, lines_of
from accel_cli.launch.check import check_launch, check_own_launcher
from accel_cli.launch.rendezvous import is_own_address
from accel_cli.launch.request import Request
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import LaunchError, SettingError
from accel_state.network import DEFAULT_PORT
from accel_state.untrusted import Shape, dict_of, integer, list_of, number, parse_json, printable, record, text

__all__ = (
    "Meeting",
    "Member",
    "clear_for_launch",
    "compare",
    "connect",
    "listen",
    "meet",
    "meet_machines",
    "receive",
    "send",
)

_LARGEST_CLOCK_DIFFERENCE: Final = 2.0


@dataclass(frozen=True)
class Member:
    """One machine of the run.

    Args:
        rank: the rank that it reports.
        host: its host name.
        versions: version of each package that must be the same on all machines.
        settings: text of each setting that must be the same on all machines.
        clock: seconds by which its clock is ahead of the main machine's.
        unreachable: ranks of machines that it could not connect to, with the reason.
        shares_folder: whether it sees the file that the main machine wrote into the shared folder; None without one.
    """

    rank: int
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    clock: float = 0.0
    unreachable: Mapping[int, str] = field(default_factory=dict)
    shares_folder: bool | None = None


def compare(members: Sequence[Member], machines: int, waited: float) -> list[Finding]:
    """Find the problems between the machines; without any, return a single finding with the verdict `OK`.

    Args:
        members: the machines that connected, the main one first.
        machines: the expected number of machines.
        waited: seconds that the main machine waited for them.
    """
    found = [*_wrong_ranks(members, machines, waited)]
    for member in members:
        found += _differences(members[0], member)
    hosts = {member.rank: member.host for member in members}
    remedy = "Open all ports between the machines in the firewall: every process connects to others."
    for member in members:
        for rank, reason in sorted(member.unreachable.items()):
            told = f"{member.host} cannot connect to {hosts.get(rank, f'machine {rank}')}: {reason}."
            found.append(Finding("network", ERROR, told, remedy))
    apart = ", ".join(member.host for member in members if member.shares_folder is False)
    if apart:
        told = f"The files that {members[0].host} writes into the shared folder are not visible on {apart}."
        found.append(Finding("shared folder", ERROR, told, "Mount the same file system at the same path everywhere."))
    return found or [
        Finding("machines", OK, f"all {machines} machines are connected and have the same versions and settings")
    ]


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
    compared = (
        ("versions", WARNING, main.versions, member.versions, "Install the same version on every machine."),
        ("settings", ERROR, main.settings, member.settings, "Use the same config file and options on every machine."),
    )
    for subject, verdict, one, other, remedy in compared:
        for name in sorted({*one, *other}):
            here, there = one.get(name, "absent"), other.get(name, "absent")
            if here != there:
                told = f"{name} is {here} on {main.host} and {there} on {member.host}."
                yield Finding(subject, verdict, told, remedy)
    if abs(member.clock) > _LARGEST_CLOCK_DIFFERENCE:
        told = f"The clock of {member.host} differs from that of {main.host} by {member.clock:+.1f} s."
        yield Finding(
            "clocks",
            WARNING,
            told,
            "Synchronise the clocks with NTP: times in logs and checkpoints are wrong without it.",
        )


_LONGEST: Final = 2**20
_DEEPEST: Final = 8
_BETWEEN_TRIES: Final = 0.2
_ONE_CONNECTION: Final = 5.0
# Time limit for the machines to connect to each other, once all have reported.
_PATIENCE: Final = 20.0

_NAMES: Final = dict_of(text())
_HELLO: Final = record(
    {
        "member": record({"rank": integer(), "host": text(), "versions": _NAMES, "settings": _NAMES}),
        "listener": integer(1, 65535),
        "time": number(),
    }
)
_PLACE: Final = record({"rank": integer(), "host": text(), "port": integer(1, 65535)})
_TOKEN: Final = text(r"(\.accel-doctor-\w{1,99})?")
_LOOKED: Final = record({"unreachable": dict_of(text(), text("[0-9]{1,9}"))})
_FIELDS: Final = ("subject", "verdict", "told", "remedy")
_FINDINGS: Final = list_of(record(dict.fromkeys(_FIELDS, text())))


def send(file: BufferedIOBase, message: Any) -> None:
    """Send a message.

    Raises:
        OSError: the other side has closed the connection.
    """
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def receive(file: BufferedIOBase, shape: Shape) -> Any:
    """Receive the next message and check its structure.

    Raises:
        OSError: no message arrived in time, the connection was closed, or the message is too long.
        ValueError: the message has another structure.
    """
    line = file.readline(_LONGEST)
    if not line.endswith(b"\n"):
        raise ConnectionError("the answer is too long" if len(line) == _LONGEST else "the connection was closed")
    return parse_json(line, shape, depth=_DEEPEST)


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
        patience = min(deadline - time.monotonic(), _ONE_CONNECTION)
        try:
            return socket.create_connection((host, port), timeout=max(patience, 0.01))
        except (OSError, ValueError):
            if time.monotonic() + _BETWEEN_TRIES >= deadline:
                raise
        time.sleep(_BETWEEN_TRIES)


@dataclass(frozen=True)
class Meeting:
    """Where the machines connect, and for how long they wait.

    Args:
        host: address of the main machine.
        port: port of the run.
        machines: number of machines.
        timeout: seconds to wait for them.
        folder: a folder that all machines should share, or None.
    """

    host: str
    port: int
    machines: int
    timeout: float
    folder: str | None = None


def meet(meeting: Meeting, me: Member) -> list[Finding]:
    """Connect to the other machines, and return the problems between them.

    Raises:
        LaunchError: the port is in use, or the main machine cannot be reached.
    """
    with listen(0) as listener:
        # A second machine with rank 0 joins as a peer, so that the finding names both.
        part = _serve if me.rank == 0 and is_own_address(meeting.host) else _join
        return part(meeting, me, listener.getsockname()[1])


class _Server(socketserver.ThreadingTCPServer):
    """The main machine's side; each connection has a thread, so that a silent one does not block the others."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("", port), _Peer, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(port)
        self.arrived: queue.Queue[_Peer] = queue.Queue()
        self.peers: futures.Future[list[_Peer]] = futures.Future()
        self.plan: futures.Future[Any] = futures.Future()
        self.report: futures.Future[Any] = futures.Future()


class _Peer(socketserver.StreamRequestHandler):
    """The main machine's end of a connection to another one."""

    timeout = _ONE_CONNECTION
    server: _Server

    def handle(self) -> None:
        """Exchange the messages with this machine, in a thread."""
        self.thread = threading.current_thread()
        self.looked: futures.Future[Any] = futures.Future()
        try:
            hello = receive(self.rfile, _HELLO)
        except (OSError, ValueError):
            # The connection did not come from a machine of the run, but for example from a port scanner.
            return
        said, clock = hello["member"], hello["time"] - time.time()
        self.member = Member(said["rank"], said["host"], said["versions"], said["settings"], clock)
        self.place = {"rank": self.member.rank, "host": self.client_address[0], "port": hello["listener"]}
        self.server.arrived.put(self)
        if self not in self.server.peers.result():
            return
        try:
            send(self.wfile, self.server.plan.result())
            self.connection.settimeout(_patience(self.server.plan.result()["roster"]))
            self.looked.set_result(receive(self.rfile, _LOOKED))
            send(self.wfile, self.server.report.result())
        except (OSError, ValueError) as error:
            if not self.looked.done():
                self.looked.set_exception(error)

    def result(self, deadline: float) -> Member:
        """The machine with its findings; unchanged if it has disconnected."""
        try:
            looked = self.looked.result(max(deadline - time.monotonic(), 0.0))
        except (OSError, ValueError, futures.TimeoutError) as error:
            return replace(self.member, unreachable={0: f"it disconnected ({error})"})
        shares = looked.get("shares")
        return replace(
            self.member,
            unreachable={int(rank): reason for rank, reason in looked["unreachable"].items()},
            shares_folder=shares if isinstance(shares, bool) else None,
        )


def _patience(roster: Sequence[Any]) -> float:
    """Time limit in seconds for the machines of a roster to connect to each other."""
    return _PATIENCE + _ONE_CONNECTION * (len(roster) + 1)


def _serve(meeting: Meeting, me: Member, listener: int) -> list[Finding]:
    try:
        server = _Server(meeting.port)
    except OSError as error:
        asked = f"Cannot accept the other machines on port {meeting.port}."
        raise LaunchError(asked, f"The port cannot be used: {error}.", "Set another --main_process_port.") from None
    with server, _token(meeting.folder) as token:
        threading.Thread(target=server.serve_forever, args=(_BETWEEN_TRIES / 4,), daemon=True).start()
        peers = _arrivals(server, meeting)
        server.shutdown()
        roster = [{"rank": me.rank, "host": meeting.host, "port": listener}, *(peer.place for peer in peers)]
        server.plan.set_result({"roster": roster, "token": token})
        server.peers.set_result(peers)
        me = _look_around(me, meeting, roster, token)
        deadline = time.monotonic() + _patience(roster)
        members = [me, *(peer.result(deadline) for peer in peers)]
        findings = compare(members, meeting.machines, meeting.timeout)
        server.report.set_result([asdict(finding) for finding in findings])
        for peer in peers:
            peer.thread.join(_ONE_CONNECTION)
    return findings


def _arrivals(server: _Server, meeting: Meeting) -> list[_Peer]:
    """The machines that connected before the deadline; return early once the expected number has connected."""
    deadline = time.monotonic() + meeting.timeout
    peers: list[_Peer] = []
    with contextlib.suppress(queue.Empty):
        while len(peers) < meeting.machines - 1:
            peers.append(server.arrived.get(timeout=max(deadline - time.monotonic(), 0.0)))
    return peers


def _join(meeting: Meeting, me: Member, listener: int) -> list[Finding]:
    deadline = time.monotonic() + meeting.timeout
    place = record({"roster": list_of(_PLACE, meeting.machines), "token": _TOKEN})
    try:
        with connect(meeting.host, meeting.port, deadline) as line, line.makefile("rwb") as file:
            send(file, {"member": asdict(me), "listener": listener, "time": time.time()})
            line.settimeout(max(deadline - time.monotonic(), 0.0) + _PATIENCE)
            plan = receive(file, place)
            looked = _look_around(me, meeting, plan["roster"], plan["token"])
            send(file, {"unreachable": looked.unreachable, "shares": looked.shares_folder})
            line.settimeout(_patience(plan["roster"]))
            return [Finding(*map(finding.get, _FIELDS)) for finding in receive(file, _FINDINGS)]
    except (OSError, ValueError) as error:
        remedy = "Check the address, that no firewall blocks the port, and that `accel doctor --nodes` runs there."
        asked = f"Cannot connect to the main machine at {meeting.host}:{meeting.port}."
        raise LaunchError(asked, f"The connection failed: {printable(error)}.", remedy) from None


def _look_around(me: Member, meeting: Meeting, roster: Sequence[Mapping[str, Any]], token: str) -> Member:
    """This machine, with the machines that it cannot reach, and whether it shares the folder."""
    unreachable: dict[int, str] = {}
    for place in roster:
        if place["rank"] == me.rank:
            continue
        try:
            connect(place["host"], place["port"], time.monotonic() + _ONE_CONNECTION).close()
        except (OSError, ValueError) as error:
            unreachable[place["rank"]] = str(error)
    shares = os.path.exists(os.path.join(meeting.folder, token)) if meeting.folder and token else None
    return replace(me, unreachable=unreachable, shares_folder=shares)


@contextlib.contextmanager
def _token(folder: str | None) -> Iterator[str]:
    """Unique name of a file in the shared folder; empty without a folder."""
    if folder is None:
        yield ""
        return
    try:
        file = tempfile.NamedTemporaryFile(prefix=".accel-doctor-", dir=folder)  # noqa: SIM115 - closed below
    except OSError as error:
        asked = f"Cannot share the folder {folder} with all machines."
        raise LaunchError(asked, f"It is not writable: {error}.", "Give a writable folder.") from None
    with file:
        yield os.path.basename(file.name)


# Settings that are different on each machine.
_PARTICULAR: Final = ("machine_rank", "main_process_ip", "gpu_ids", "device", "log_dir", "num_cpu_threads_per_process")

_COMPARED: Final = ("torch", "accel-state", "accel-ops", "accel-data", "accel-plugins", "accel-cli", "accel-torch")

_LAUNCH_PATIENCE: Final = 120.0
"""Seconds for which a launch waits for the other machines."""


def meet_machines(request: Request, timeout: float, shared_folder: str | None) -> Sequence[Finding]:
    """Connect to the other machines of a launch, and return the problems between them.

    Raises:
        SettingError: the launch uses only one machine.
        LaunchError: the main machine cannot be reached, or its port is in use.
    """
    check_launch(request.settings)
    check_own_launcher(request.settings)
    machines = request.settings.instance(MachineSettings)
    if machines.num_machines < 2 or machines.main_process_ip is None:
        raise SettingError(
            "Cannot connect the machines of a run.",
            "The launch uses only one machine.",
            "Add the arguments of the launch: accel doctor --nodes -- --num_machines 2 --machine_rank 0 "
            "--main_process_ip ADDRESS",
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
        LaunchError: a run would fail, or the machines did not connect in time.
    """
    if not request.settings["preflight"].value or request.settings["num_machines"].value < 2:
        return
    findings = meet_machines(request, _LAUNCH_PATIENCE, None)
    if any(finding.verdict == ERROR for finding in findings):
        raise LaunchError(
            "Cannot launch: --preflight found problems between the machines.",
            "\n  ".join(lines_of(findings)),
            "No process was started. Correct the problems, or remove --preflight to start anyway.",
        )
