"""Names of `accelerate.state` that nothing of ours needs."""

from __future__ import annotations

import threading
from typing import Any, Final

from accel_state import current

__all__ = ("SharedDict", "ThreadLocalSharedDict", "do_nothing", "is_initialized")

SharedDict: Final = dict


class ThreadLocalSharedDict(threading.local):
    """A class attribute that is a dict of its own in every thread.

    Args:
        thread_local: True whatever is given; one dict for all threads is a plain class attribute.

    Example:
        >>> class Counted:
        ...     counts = ThreadLocalSharedDict()
        >>> Counted().counts["seen"] = 1
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._kept: dict[Any, Any] = {}

    def __get__(self, owner: object, kind: type | None = None) -> dict[Any, Any]:
        return self._kept

    def __set__(self, owner: object, value: dict[Any, Any]) -> None:
        self._kept = value


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes anything and does nothing."""


def is_initialized() -> bool:
    """Whether an Accelerator, or an AcceleratorState, was made in this process."""
    return current.run_or_none() is not None
