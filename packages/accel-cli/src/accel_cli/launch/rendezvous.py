"""The rendezvous of processes: a port on one machine, reserved without a race, and the address for several machines.

The launcher binds the port and does not listen on it. While it is bound, the system does not assign it to other
programs. The store of torch, which sets SO_REUSEADDR as the launcher does, can still listen on it, even a second time
after a process group was destroyed. A second launcher could bind it for the same reason, so each launcher also claims
the number. (On Linux; on other systems the port is released right before the processes start.)

torch.distributed.run compares the host name of this machine with the rendezvous address. If the name resolves to a
loopback address, as on Debian, no machine recognises itself as the host of the store, or the others receive the address
127.0.1.1. This module compares the addresses of the machine's interfaces instead.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Final, NamedTuple

from accel_state.errors import LaunchError, SettingError

__all__ = (
    "Port",
    "Seat",
    "claim",
    "interface_towards",
    "is_own_address",
    "owner_of",
    "seat_at",
)

_CAN_BE_KEPT: Final = sys.platform.startswith("linux")
_LISTENING: Final = "0A"

_CLAIM: Final = "\0accel-port-{}"
"""Name of the Unix socket with which a launcher claims a port; the kernel releases it when the launcher ends."""

_CREDENTIALS: Final = struct.Struct("3i")


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
        self._sockets = list(_bound(wanted or 0, origin))
        self.number = int(self._sockets[0].getsockname()[1])
        if not _CAN_BE_KEPT:
            self.close()
            return
        try:
            self._sockets.append(claim(self.number))
        except OSError as error:
            self.close()
            raise _refused(self.number, origin, error) from None

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


def _bound(number: int, origin: str) -> Iterator[socket.socket]:
    """A socket that is bound to the port on all addresses, as the store's socket is."""
    refusal: OSError | None = None
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            yield _bind(family, address, number)
            return
        except OSError as error:
            refusal = error
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                break
    raise _refused(number, origin, refusal)


def _bind(family: socket.AddressFamily, address: str, number: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, number))
    except OSError:
        bound.close()
        raise
    return bound


def claim(number: int) -> socket.socket:
    """Claim a port of this machine while the returned socket is open.

    Raises:
        OSError: another process claims it.
        NotImplementedError: this system does not support such sockets.
    """
    if not _CAN_BE_KEPT:
        raise NotImplementedError("Only Linux has Unix sockets without a file.")
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(_CLAIM.format(number))
        claimed.listen()
    except OSError:
        claimed.close()
        raise
    return claimed


def _claimant(number: int) -> str | None:
    """The launcher that claims a port, as "name (pid 123)", or an empty text."""
    if not _CAN_BE_KEPT:
        return None
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_CLAIM.format(number))
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return None
    return _described(str(_CREDENTIALS.unpack(credentials)[0]))


def _refused(number: int, origin: str, error: OSError | None) -> Exception:
    if not number:
        return LaunchError(
            "Cannot find a free port for the rendezvous of the processes.",
            f"The system reports: {error}.",
            "Check the network of this machine, or set --main_process_port.",
        )
    asked = f"Cannot use main_process_port={number} ({origin})."
    if error is not None and error.errno == errno.EADDRINUSE:
        owner = owner_of(number) or _claimant(number)
        by = f" by {owner}" if owner else ""
        return SettingError(asked, f"The port is in use{by}.", "Set another port, or 0 to select a free one.")
    return SettingError(asked, f"The port cannot be used: {error}.", "Set another port, or 0 to select a free one.")


def owner_of(number: int) -> str | None:
    """The process that listens on a port, as "name (pid 123)", if the system reports it."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(table, number)}
    for process in filter(str.isdigit, _names("/proc") if inodes else ()):
        for descriptor in _names(f"/proc/{process}/fd"):
            if _target(f"/proc/{process}/fd/{descriptor}") in inodes:
                return _described(process)
    return None


def _described(process: str) -> str:
    return f"{_first_line(f'/proc/{process}/comm')} (pid {process})"


def _listening(table: str, number: int) -> Iterator[str]:
    """Inodes of the sockets that listen on a port."""
    try:
        with open(f"/proc/net/{table}", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return
    for row in rows:
        if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == number:
            yield row[9]


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


_GET_ADDRESS = 0x8915

_NO_ROUTE_NEEDED = 9
"""Any port, for a socket that only looks up a route; nothing is sent to it."""


class Seat(NamedTuple):
    """The role of this machine in the rendezvous.

    Args:
        serves: whether it serves the store; None lets torch decide.
        address: address at which the other machines reach this one; None lets torch decide.
        claim: claim of the port while the store is served, so that a second agent on this machine joins as a client.
    """

    serves: bool | None
    address: str | None
    claim: socket.socket | None = None


def seat_at(host: str, port: int) -> Seat:
    """The role of this machine in a rendezvous at a host and port.

    Example:
        >>> seat_at("192.0.2.1", 29500).serves
        False
    """
    if not is_own_address(host):
        return Seat(False, _address_towards(host))
    if not port:
        # A free port is selected, which no other process can have.
        return Seat(True, host)
    try:
        # The other machines use the given name for this machine, even if it resolves to another address here.
        return Seat(True, host, claim(port))
    except OSError:
        return Seat(False, host)
    except NotImplementedError:
        return Seat(None, host)


def interface_towards(host: str) -> str | None:
    """The network interface on the route to the rendezvous host; None if gloo finds it itself.

    gloo uses the address that the host name resolves to. If that is a loopback address, no other machine can reach it.
    """
    if not all(_is_loopback(found[4][0]) for found in _resolved(socket.gethostname())):
        return None
    address = _address_towards(host)
    if address is None or _is_loopback(address):
        return None
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _GET_ADDRESS, name.encode().ljust(256, b"\0"))
            except OSError:
                # The interface has no address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def is_own_address(host: str) -> bool:
    """Whether a name or address belongs to this machine."""
    for family, kind, protocol, _, address in _resolved(host):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


def _address_towards(host: str) -> str | None:
    """The address of this machine on the route to a host, or None where there is no route."""
    for family, _, _, _, address in _resolved(host):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # For a datagram socket, `connect` only looks up the route.
                probe.connect((address[0], _NO_ROUTE_NEEDED, *address[2:]))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _resolved(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []
