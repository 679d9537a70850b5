"""The machines of a run meet before it: the main one collects what all say and tells everybody the verdict.

main machine                              every other machine
listens on the port of the run     <--    hello: rank, host, versions, settings, port of its own
its time                           -->    how far the clocks are apart
who is where, token of the folder  -->    connects to all others, looks into the shared folder
                                   <--    what it found
findings                           -->    the same report everywhere
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from accel_cli.doctor.compare import Member, compare
from accel_cli.doctor.finding import Finding
from accel_cli.doctor.wire import Line, Unreachable, connect, listen
from accel_cli.launch.meeting_place import is_own_address
from accel_state.errors import LaunchError
from accel_state.untrusted import Shape, dict_of, integer, list_of, number, printable, record, text

__all__ = ("Meeting", "meet")

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
