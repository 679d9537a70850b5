"""Which machine a run of several meets on, and by which address the others reach this one.

torch.distributed.run compares the host name of this machine with the place where the machines meet. Where the name
resolves to a loopback address, as Debian sets it up, no machine finds itself there and nobody serves the store, or the
others receive the address 127.0.1.1. Here the machine's own addresses decide.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from accel_cli.launch.ports import claim

__all__ = ("Seat", "interface_towards", "is_own_address", "seat_at")

_GET_ADDRESS = 0x8915

_NO_ROUTE_NEEDED = 9
"""A port to name where the route alone counts; nothing is sent to it."""


class Seat(NamedTuple):
    """This machine's part in a meeting.

    Args:
        serves: whether it serves the store; None lets torch decide.
        address: by which the other machines reach this one; None lets torch decide.
        claim: kept while the store is served, so that a second agent of this machine joins as a client.
    """

    serves: bool | None
    address: str | None
    claim: socket.socket | None = None


def seat_at(host: str, port: int) -> Seat:
    """The part of this machine where the machines of a run meet at a host and port.

    Example:
        >>> seat_at("192.0.2.1", 29500).serves
        False
    """
    if not is_own_address(host):
        return Seat(False, _address_towards(host))
    if not port:
        # A free one is chosen, which nobody else can have.
        return Seat(True, host)
    try:
        # The others know this machine by the name that was given, whatever it resolves to here.
        return Seat(True, host, claim(port))
    except OSError:
        return Seat(False, host)
    except NotImplementedError:
        return Seat(None, host)


def interface_towards(host: str) -> str | None:
    """The network interface that leads to the machine where others meet; None where gloo finds it by itself.

    gloo takes the address that the host name resolves to, which no other machine reaches when it is a loopback address.
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
                # It has no address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def is_own_address(host: str) -> bool:
    """Whether a name or address is one of this machine's."""
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
                # Of a datagram socket this only looks the route up.
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
