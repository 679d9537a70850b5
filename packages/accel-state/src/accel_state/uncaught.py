"""Errors that a backend raises outside our calls: in a backward or forward pass, or in the user's own collectives."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from accel_state import current
from accel_state.errors import AccelError

__all__ = ("explain_backend_error", "install_hook")

_BACKEND_ERROR_TEXTS: Final = (
    r"gloo/|NCCL|Connection (closed|reset) by peer|Application timeout caused pair closure|Timed out waiting \d+ms"
)
"""Parts of the messages of backends that raise a plain RuntimeError."""


def explain_backend_error(error: BaseException) -> None:
    """Append the position of every rank to an error that a backend raised, unless the error contains it already."""
    process = current.process_or_none()
    if process is None or process.inherited or process.world_size == 1 or isinstance(error, AccelError):
        return
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search(_BACKEND_ERROR_TEXTS, str(error))
    ):
        from accel_state.protocol.state import protocol_state
        from accel_state.watch.report import extend_error

        extend_error(error, process.rank, process.world_size, protocol_state(process.transport).monitor)


def install_hook() -> None:
    """Install the hook that extends uncaught errors of the backend before they are shown; once per process."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """The newest hook of the chain.

    Args:
        then: the previous hook, which shows the error.
    """

    def __init__(self, then: Callable[..., Any]) -> None:
        self._then = then

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Called by the interpreter."""
        if kind is not KeyboardInterrupt:
            from accel_state.transport.shutdown import record_exit_exception

            record_exit_exception(error)
            explain_backend_error(error)
        self._then(kind, error, trace)
