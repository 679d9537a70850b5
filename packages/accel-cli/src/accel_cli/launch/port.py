"""A port of this machine for the rendezvous of the processes, kept from other launchers until the store listens on it.

The launcher binds the port and does not listen on it. While it is bound, the system does not assign it to other
programs, and a second launcher cannot reserve it, because a launcher sets SO_REUSEADDR only after it has bound the
port. From then on, the store of torch, which sets this option too, can listen on it, even a second time after a process
group was destroyed. (On Linux; on other systems the port is released right before the processes start.)

A port that has connections of an earlier run can only be bound with SO_REUSEADDR, also by several programs. Therefore
each launcher also binds the UDP port of that number on the loopback interface, as a mark for other launchers. It
receives nothing there. A launcher without the mark reserves only a port that has no such connections.

Any program that sets the option can do so first, also that of another user. Therefore the processes prove to each other
that they know the secret of the run before they use the store; see `accel_state.transport.rendezvous`.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from accel_state.errors import LaunchError, SettingError

__all__ = ("CAN_BE_KEPT", "Port", "owner_of")

CAN_BE_KEPT: Final = sys.platform.startswith("linux")
"""Whether a port stays reserved while the store listens on it; else it is released before the processes start."""

_ADDRESS_COLUMN: Final = 1
_STATE_COLUMN: Final = 3
_INODE_COLUMN: Final = 9
"""Columns of the system's tables of sockets."""

_LISTENING_STATE: Final = "0A"


class Port:
    """A TCP port of this machine, reserved until `close`.

    Args:
        wanted: the port, or None for a free one.
        origin: source of the port, for messages.

    Raises:
        SettingError: the wanted port is in use or not allowed.
        LaunchError: no port could be bound at all.
    """

    def __init__(self, wanted: int | None = None, origin: str = "") -> None:
        self._sockets = _reserved(wanted or 0, origin)
        self.number = int(self._sockets[0].getsockname()[1])
        if not CAN_BE_KEPT:
            self.close()

    def close(self) -> None:
        """Release the port."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> Port:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reserved(number: int, origin: str = "") -> list[socket.socket]:
    """A socket that is bound to the port on all addresses, as the store's socket is, and the mark, if it was free.

    Raises:
        SettingError: the port is in use or not allowed.
        LaunchError: no port could be bound at all.
    """
    refusal: OSError | None = None
    mark = _mark(number) if number else None
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            bound = _bind(family, address, number, marked=mark is not None)
        except OSError as error:
            refusal = error
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                break
        else:
            mark = mark or _mark(bound.getsockname()[1])
            return [bound] if mark is None else [bound, mark]
    if mark is not None:
        mark.close()
    raise _refused(number, origin, refusal)


def _mark(number: int) -> socket.socket | None:
    """The mark of a port; None if another launcher, or a program that uses the number for datagrams, has it."""
    mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        mark.bind(("127.0.0.1", number))
    except OSError:
        mark.close()
        return None
    return mark


def _bind(family: socket.AddressFamily, address: str, number: int, *, marked: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if CAN_BE_KEPT:
            _bind_alone(bound, address, number, marked=marked)
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not CAN_BE_KEPT:
            bound.bind((address, number))
    except OSError:
        bound.close()
        raise
    return bound


def _bind_alone(bound: socket.socket, address: str, number: int, *, marked: bool) -> None:
    """Bind a socket to a port that no other socket is bound to, except for connections of a run that has ended.

    Raises:
        OSError: another program has bound the port.
    """
    try:
        bound.bind((address, number))
    except OSError as error:
        states = [row[_STATE_COLUMN] for row in _sockets_at(number)]
        if error.errno != errno.EADDRINUSE or not marked or not states or _LISTENING_STATE in states:
            raise
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, number))


def _refused(number: int, origin: str, error: OSError | None) -> Exception:
    if not number:
        return LaunchError(
            "Cannot find a free port for the rendezvous of the processes.",
            f"The system reports: {error}.",
            "Check the network of this machine, or set --main_process_port.",
        )
    failure = f"Cannot use main_process_port={number} ({origin})."
    if error is not None and error.errno == errno.EADDRINUSE:
        owner = owner_of(number)
        listening = any(row[_STATE_COLUMN] == _LISTENING_STATE for row in _sockets_at(number))
        by = f" by {owner}" if owner else "" if listening else "; another launch may have reserved it"
        return SettingError(failure, f"The port is in use{by}.", "Set another port, or 0 to select a free one.")
    return SettingError(failure, f"The port cannot be used: {error}.", "Set another port, or 0 to select a free one.")


def owner_of(number: int) -> str | None:
    """The process that listens on a port, as "name (pid 123)", if the system reports it."""
    inodes = {f"socket:[{row[_INODE_COLUMN]}]" for row in _sockets_at(number) if row[_STATE_COLUMN] == _LISTENING_STATE}
    for process in filter(str.isdigit, _names("/proc") if inodes else ()):
        for descriptor in _names(f"/proc/{process}/fd"):
            if _target(f"/proc/{process}/fd/{descriptor}") in inodes:
                return f"{_first_line(f'/proc/{process}/comm')} (pid {process})"
    return None


def _sockets_at(number: int) -> Iterator[list[str]]:
    """The system's rows about the sockets of this machine that listen on a port or are connected to it."""
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        yield from (row for row in rows if int(row[_ADDRESS_COLUMN].rpartition(":")[2], 16) == number)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return "a process"
