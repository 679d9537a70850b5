"""The machines of a run meet before it: the main one collects what all say and tells everybody the verdict.

Their messages, in order:

    main machine                              every other machine
    listens on the port of the run     <--    hello: rank, host, versions, settings, port of its own
    its time                           -->    how far the clocks are apart
    who is where, token of the folder  -->    connects to all others, looks into the shared folder
                                       <--    what it found
    findings                           -->    the same report everywhere
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Final

from accel_cli.distributions import versions
from accel_cli.doctor.examine import FINE, TROUBLE, WORRY, Finding, lines_of
from accel_cli.launch.check import check_launch, check_own_launcher
from accel_cli.launch.rendezvous import is_own_address
from accel_cli.launch.request import Request
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import LaunchError, SettingError
from accel_state.network import DEFAULT_PORT
from accel_state.untrusted import Shape, dict_of, integer, list_of, number, parse_json, printable, record, text

__all__ = (
    "Line",
    "Meeting",
    "Member",
    "Unreachable",
    "clear_for_launch",
    "compare",
    "connect",
    "listen",
    "meet",
    "meet_machines",
)

_LONGEST: Final = 2**20
_BETWEEN_TRIES: Final = 0.2
_ONE_TRY: Final = 5.0
_CHUNK: Final = 65536
_DEEPEST: Final = 8


class Unreachable(Exception):
    """The other side cannot be reached, has gone, or does not speak as expected."""


class Line:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = bytearray()
        self._complete = False

    def fileno(self) -> int:
        """The descriptor of the connection, to be waited for."""
        return self._connection.fileno()

    @property
    def peer(self) -> str:
        """Address of the other side.

        Raises:
            Unreachable: it has gone.
        """
        try:
            return str(self._connection.getpeername()[0])
        except OSError as error:
            raise Unreachable(str(error)) from None

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            Unreachable: the other side has gone.
        """
        try:
            self._connection.settimeout(_ONE_TRY)
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Unreachable(str(error)) from None

    def receive(self, deadline: float, shape: Shape | None = None) -> Any:
        """The next message.

        Args:
            deadline: until when to wait, by `time.monotonic()`.
            shape: what the message has to be like.

        Raises:
            Unreachable: no message arrived in time, or one of another shape.
        """
        while not self._complete:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unreachable("no answer in time")
            self.read_chunk(left)
        text, _, rest = self._pending.partition(b"\n")
        self._pending, self._complete = rest, b"\n" in rest
        try:
            return parse_json(bytes(text), shape, depth=_DEEPEST)
        except ValueError as error:
            raise Unreachable(f"the answer is not a message of accel: {error}") from None

    def read_chunk(self, patience: float) -> bool:
        """Take what has come, after waiting for it for some seconds; whether a message is complete.

        Raises:
            Unreachable: the other side has gone, or its message is too long.
        """
        if self._complete:
            return True
        try:
            self._connection.settimeout(patience)
            chunk = self._connection.recv(_CHUNK)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError as error:
            raise Unreachable(str(error)) from None
        if not chunk:
            raise Unreachable("the connection was closed")
        self._pending += chunk
        # Only the chunk is searched: one byte at a time must not cost the whole message each time.
        self._complete = b"\n" in chunk
        if len(self._pending) > _LONGEST:
            raise Unreachable("the answer is too long")
        return self._complete

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listen(port: int) -> socket.socket:
    """A listening socket on all addresses; port 0 takes a free one.

    Raises:
        OSError: the port cannot be used.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def connect(host: str, port: int, deadline: float) -> Line:
    """Connect, trying again while the other side is not there yet.

    Raises:
        Unreachable: it was not there until the deadline.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            return Line(socket.create_connection((host, port), timeout=max(min(left, _ONE_TRY), 0.01)))
        except (OSError, ValueError, OverflowError) as error:
            if time.monotonic() + _BETWEEN_TRIES >= deadline:
                raise Unreachable(str(error)) from None
        time.sleep(_BETWEEN_TRIES)


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


# How long machines have for each other once all are there.
_PATIENCE: Final = 20.0
_ONE_CONNECTION: Final = 5.0
_MOST_WAITING: Final = 64
"""Connections that have not said who they are; the oldest goes when there are more."""
_LONGEST_TEXT: Final = 300

_NAMES: Final = dict_of(text())
_HELLO: Final = record(
    {
        "member": record({"rank": integer(), "host": text(), "versions": _NAMES, "settings": _NAMES}),
        "listener": integer(1, 65535),
    }
)
_LOOKED: Final = record({"unreachable": dict_of(text(), text("[0-9]{1,9}")), "clock": number()})
_FIELDS: Final = ("subject", "verdict", "told", "remedy")
_FINDINGS: Final = list_of(record(dict.fromkeys(_FIELDS, text())))


def _plan(machines: int) -> Shape:
    """Shape of what the main machine tells: who is where, and the name of a file in the shared folder."""

    def place(value: Any) -> str:
        shapes = (integer(), text(), integer(1, 65535))
        if not isinstance(value, list) or len(value) != len(shapes):
            return " is not a rank, an address and a port"
        return next((wrong for shape, one in zip(shapes, value, strict=True) if (wrong := shape(one))), "")

    def roster(value: Any) -> str:
        return list_of(place)(value) or ("" if len(value) <= machines else " has too many machines")

    return record({"roster": roster, "token": text(r"(\.accel-doctor-[0-9a-f]{32})?")})


@dataclass(frozen=True)
class Meeting:
    """Where and how the machines meet.

    Args:
        host: address of the main machine.
        port: port of the run.
        machines: how many machines take part.
        timeout: seconds to wait for them.
        folder: a folder that all should share, or None.
    """

    host: str
    port: int
    machines: int
    timeout: float
    folder: str | None = None


def meet(meeting: Meeting, me: Member) -> list[Finding]:
    """Meet the other machines and return what is wrong between them.

    Raises:
        LaunchError: this machine could not take part: the port is in use, or the main machine was not reached.
    """
    with listen(0) as listener:
        # A second machine that takes itself for the main one joins as a peer, so that both are named.
        if me.rank == 0 and is_own_address(meeting.host):
            return _serve(meeting, me, listener)
        return _join(meeting, me, listener)


@dataclass
class _Peer:
    line: Line
    member: Member
    address: tuple[str, int]


def _serve(meeting: Meeting, me: Member, listener: socket.socket) -> list[Finding]:
    try:
        server = listen(meeting.port)
    except OSError as error:
        asked = f"The machines were to meet on port {meeting.port}."
        raise LaunchError(asked, f"It cannot be used: {error}.", "Give another --main_process_port.") from None
    with server, _token(meeting.folder) as token:
        peers = _accept(server, meeting)
        me = _look_around(me, meeting, _roster(meeting, me, listener, peers), token)
        members = [me, *_results(peers, _roster(meeting, me, listener, peers), token)]
        findings = compare(members, meeting.machines, meeting.timeout)
        for peer in peers:
            with contextlib.suppress(Unreachable):
                peer.line.send([asdict(finding) for finding in findings])
            peer.line.close()
    return findings


def _accept(server: socket.socket, meeting: Meeting) -> list[_Peer]:
    """Those who came before the deadline; everybody is there when as many came as should.

    All connections are listened to at once, so that one that says nothing keeps no machine waiting.
    """
    deadline = time.monotonic() + meeting.timeout
    waiting: dict[Line, float] = {}
    peers: list[_Peer] = []
    server.setblocking(False)
    try:
        while len(peers) < meeting.machines - 1 and (left := deadline - time.monotonic()) > 0:
            heard_from: list[socket.socket | Line] = [server, *waiting]
            heard, _, _ = select.select(heard_from, [], [], min(left, _ONE_CONNECTION / 10))
            for line in [line for line in heard if isinstance(line, Line)]:
                try:
                    if not line.read_chunk(0.0):
                        continue
                    if len(peers) < meeting.machines - 1:
                        peers.append(_peer_of(line))
                        del waiting[line]
                except Unreachable:
                    # A port scanner is not a machine of the run.
                    del waiting[line]
                    line.close()
            if server in heard:
                with contextlib.suppress(OSError):
                    waiting[Line(server.accept()[0])] = time.monotonic() + _ONE_CONNECTION
            late = [line for line, until in waiting.items() if until < time.monotonic()]
            for line in late or list(waiting)[: max(0, len(waiting) - _MOST_WAITING)]:
                del waiting[line]
                line.close()
    finally:
        for line in waiting:
            line.close()
    return peers


def _peer_of(line: Line) -> _Peer:
    """A machine of the run, by the message that came from it.

    Raises:
        Unreachable: it has gone, or the message is none of a machine of the run.
    """
    hello = line.receive(time.monotonic() + _ONE_CONNECTION, _HELLO)
    line.send(time.time())
    told = hello["member"]
    versions, settings = ({_shown(n): _shown(v) for n, v in told[kind].items()} for kind in ("versions", "settings"))
    return _Peer(line, Member(told["rank"], _shown(told["host"]), versions, settings), (line.peer, hello["listener"]))


def _shown(said: str) -> str:
    """What somebody else said, as a terminal can show it."""
    return printable(f"{said:.{_LONGEST_TEXT}}")


def _roster(meeting: Meeting, me: Member, listener: socket.socket, peers: list[_Peer]) -> list[list[Any]]:
    """Rank, address and port of everybody's listener."""
    own = [me.rank, meeting.host, listener.getsockname()[1]]
    return [own, *([peer.member.rank, *peer.address] for peer in peers)]


def _results(peers: list[_Peer], roster: list[list[Any]], token: str) -> Iterator[Member]:
    """What each peer found when it looked around; one that went away meanwhile is as it was."""
    for peer in peers:
        with contextlib.suppress(Unreachable):
            peer.line.send({"roster": roster, "token": token})
    deadline = time.monotonic() + _PATIENCE + _ONE_CONNECTION * len(roster)
    for peer in peers:
        try:
            answer = peer.line.receive(deadline, _LOOKED)
        except Unreachable as error:
            yield replace(peer.member, unreachable={0: f"it went away ({_shown(str(error))})"})
            continue
        unreachable = {int(rank): _shown(reason) for rank, reason in answer["unreachable"].items()}
        shares = answer.get("shares")
        yield replace(
            peer.member,
            unreachable=unreachable,
            clock=float(answer["clock"]),
            shares_folder=shares if isinstance(shares, bool) else None,
        )


def _join(meeting: Meeting, me: Member, listener: socket.socket) -> list[Finding]:
    asked = f"This machine was to meet the main one at {meeting.host}:{meeting.port}."
    deadline = time.monotonic() + meeting.timeout
    try:
        with connect(meeting.host, meeting.port, deadline) as line:
            findings = _take_part(line, meeting, me, listener.getsockname()[1], deadline)
    except Unreachable as error:
        remedy = "Check the address, that nothing blocks the port, and that `accel doctor --nodes` runs there."
        raise LaunchError(asked, f"That failed: {printable(error)}.", remedy) from None
    return findings


def _take_part(line: Line, meeting: Meeting, me: Member, listener: int, deadline: float) -> list[Finding]:
    sent = time.time()
    line.send({"member": asdict(me), "listener": listener})
    main_time = float(line.receive(deadline, number()))
    clock = (sent + time.time()) / 2 - main_time
    plan = line.receive(deadline + _PATIENCE, _plan(meeting.machines))
    looked = _look_around(me, meeting, plan["roster"], plan["token"])
    line.send({"unreachable": looked.unreachable, "clock": clock, "shares": looked.shares_folder})
    patience = _PATIENCE + _ONE_CONNECTION * (len(plan["roster"]) + 1)
    found = line.receive(time.monotonic() + patience, _FINDINGS)
    return [Finding(**{name: printable(finding[name]) for name in _FIELDS}) for finding in found]


def _look_around(me: Member, meeting: Meeting, roster: list[list[Any]], token: str) -> Member:
    """This machine, with whom it cannot reach and whether it shares the folder."""
    unreachable: dict[int, str] = {}
    for rank, host, port in roster:
        if rank == me.rank:
            continue
        try:
            connect(host, port, time.monotonic() + _ONE_CONNECTION).close()
        except Unreachable as error:
            unreachable[rank] = str(error)
    shares = os.path.exists(os.path.join(meeting.folder, token)) if meeting.folder and token else None
    return replace(me, unreachable=unreachable, shares_folder=shares)


@contextlib.contextmanager
def _token(folder: str | None) -> Iterator[str]:
    """Name of a file in the shared folder that only this meeting knows; empty without a folder."""
    if folder is None:
        yield ""
        return
    name = f".accel-doctor-{uuid.uuid4().hex}"
    path = os.path.join(folder, name)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write("written by accel doctor; may be removed\n")
    except OSError as error:
        asked = f"Cannot share the folder {folder} with all machines."
        raise LaunchError(asked, f"It cannot be written: {error}.", "Give a folder that can.") from None
    try:
        yield name
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)


# Settings that differ from machine to machine by their nature.
_PARTICULAR: Final = ("machine_rank", "main_process_ip", "gpu_ids", "device", "log_dir", "num_cpu_threads_per_process")

_COMPARED: Final = ("torch", "accel-state", "accel-ops", "accel-data", "accel-plugins", "accel-cli", "accel-torch")

_LAUNCH_PATIENCE: Final = 120.0
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
    findings = meet_machines(request, _LAUNCH_PATIENCE, None)
    if any(finding.verdict == TROUBLE for finding in findings):
        raise LaunchError(
            "The machines met before the launch (--preflight).",
            "\n  ".join(lines_of(findings)),
            "Nothing was started. Correct it, or leave out --preflight to start all the same.",
        )
