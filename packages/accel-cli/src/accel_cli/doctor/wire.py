"""Messages between machines before a run: one line of JSON each, bounded in size and in time."""

from __future__ import annotations

import json
import socket
import time
from types import TracebackType
from typing import Any, Final

from accel_state.untrusted import Shape, parse_json

__all__ = ("Line", "Unreachable", "connect", "listen")

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
