"""Messages between two processes over gloo.

gloo broadcasts a large tensor to one process in 1.2 times the time of a message, and with the header of a call it would
take longer than a broadcast without checks.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch

__all__ = ("MessageWork", "broadcast_to_other", "close_connections")

_NEVER_SENT: Final = 1
"""Tag of a message that no process sends; all others have the tag 0."""

_AT_ONCE: Final = timedelta(milliseconds=1)


class MessageWork:
    """A message that was started; `wait` also raises the error of the start.

    Args:
        operation: starts the message and returns its work: `send` or `recv` of a process group.
        tensor: what it sends or receives.
        other: rank of the other process.
    """

    __slots__ = ("_ended", "_error", "_work")

    def __init__(self, operation: Any, tensor: torch.Tensor, other: int) -> None:
        self._ended = False
        self._error: RuntimeError | None = None
        try:
            self._work = operation([tensor], other, 0)
        except RuntimeError as error:
            self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is complete.

        Ignores a `timeout` shorter than the group's: gloo would close the connections after it.
        """
        if not self._ended:
            self._ended = True
            try:
                if self._error is None:
                    self._work.wait()
            except RuntimeError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has completed it."""
        return self._ended


def broadcast_to_other(tensor: torch.Tensor, src: int, group: Any) -> MessageWork:
    """Overwrite `tensor` with that of process `src`, between two processes."""
    sends = group.rank() == src
    return MessageWork(group.send if sends else group.recv, tensor, 1 - group.rank())


def close_connections(group: Any) -> None:
    """Close the connections of this process: gloo does so when a message does not arrive in time."""
    other = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], other, _NEVER_SENT).wait(_AT_ONCE)
