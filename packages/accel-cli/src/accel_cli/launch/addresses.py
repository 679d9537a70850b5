"""The addresses of this machine, and its role in a rendezvous of several machines.

torch.distributed.run compares the host name of this machine with the rendezvous address. If the name resolves to a
loopback address, as on Debian, no machine recognises itself as the host of the store, or the others receive the address
127.0.1.1. This module compares the addresses of the machine's interfaces instead.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from accel_cli.launch.port import CAN_BE_KEPT, Port
from accel_state.errors import SettingError

__all__ = ("Seat", "address_towards", "interface_towards", "is_own_address", "seat_at")

_SIOCGIFADDR = 0x8915

_ANY_PORT = 9
"""Any port, for a socket that only looks up a route; nothing is sent to it."""


class Seat(NamedTuple):
    """The role of this machine in the rendezvous.

    Args:
        serves: whether it serves the store; None lets torch decide.
        address: address at which the other machines reach this one; None lets torch decide.
        port: the port, reserved while the store is served, so that a second agent on this machine joins as a client.
    """

    serves: bool | None
    address: str | None
    port: Port | None = None


def seat_at(host: str, port: int) -> Seat:
    """The role of this machine in a rendezvous at a host and port.

    Example:
        >>> seat_at("192.0.2.1", 29500).serves
        False
    """
    if not is_own_address(host):
        return Seat(False, address_towards(host))
    if not port:
        # A free port is selected, which no other process can have.
        return Seat(True, host)
    if not CAN_BE_KEPT:
        return Seat(None, host)
    try:
        # The other machines use the given name for this machine, even if it resolves to another address here.
        return Seat(True, host, Port(port))
    except SettingError:
        return Seat(False, host)


def interface_towards(host: str) -> str | None:
    """The network interface on the route to the rendezvous host; None if gloo finds it itself.

    gloo uses the address that the host name resolves to. If that is a loopback address, no other machine can reach it.
    """
    if not all(_is_loopback(info[4][0]) for info in _resolved(socket.gethostname())):
        return None
    address = address_towards(host)
    if address is None or _is_loopback(address):
        return None
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
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


def address_towards(host: str) -> str | None:
    """The address of this machine on the route to a host, or None without a route."""
    for family, _, _, _, address in _resolved(host):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # For a datagram socket, `connect` only looks up the route.
                probe.connect((address[0], _ANY_PORT, *address[2:]))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _resolved(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except (OSError, UnicodeError):
        return []
