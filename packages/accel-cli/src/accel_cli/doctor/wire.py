"""Messages between machines before a run: one line of JSON each, bounded in size and in time."""

from __future__ import annotations

import json
import socket
import time
from types import TracebackType
from typing import Any, Final

__all__ = ("Line", "Unreachable", "connect", "is_own_address", "listen")

_LONGEST: Final = 2**20
_BETWEEN_TRIES: Final = 0.2
_ONE_TRY: Final = 5.0


class Unreachable(Exception):
    """The other side cannot be reached, has gone, or does not speak as expected."""


class Line:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""

    @property
    def peer(self) -> str:
        """Address of the other side."""
        return str(self._connection.getpeername()[0])

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

    def receive(self, deadline: float) -> Any:
        """The next message.

        Args:
            deadline: until when to wait, by `time.monotonic()`.

        Raises:
            Unreachable: none came, or something that is no message.
        """
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or len(self._pending) > _LONGEST:
                raise Unreachable("no answer in time" if left <= 0 else "the answer is too long")
            try:
                self._connection.settimeout(left)
                chunk = self._connection.recv(65536)
            except TimeoutError:
                continue
            except OSError as error:
                raise Unreachable(str(error)) from None
            if not chunk:
                raise Unreachable("the connection was closed")
            self._pending += chunk
        text, _, self._pending = self._pending.partition(b"\n")
        try:
            return json.loads(text)
        except ValueError:
            raise Unreachable("the answer is no message of ours") from None

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
        except OSError as error:
            if time.monotonic() + _BETWEEN_TRIES >= deadline:
                raise Unreachable(str(error)) from None
        time.sleep(_BETWEEN_TRIES)


def is_own_address(host: str) -> bool:
    """Whether a name or address is one of this machine's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False
