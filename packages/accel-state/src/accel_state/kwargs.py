"""Data classes with keyword arguments for objects that this project creates for the user."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from accel_state.errors import SettingError

__all__ = ("InitProcessGroupKwargs", "KwargsHandler")


@dataclass
class KwargsHandler:
    """Base class of the objects in `kwargs_handlers`."""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from the defaults of the class."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group of a run is initialised.

    Args:
        backend: name of the torch.distributed backend; "nccl" and None select the backend of the device.
        init_method: URL of the rendezvous; by default from the environment. A `backend` that contains "://" is used
            as `init_method`.
        timeout: timeout of a collective, a timedelta or seconds; by default 30 minutes, 10 on GPUs.

    Raises:
        SettingError: the timeout is not a positive duration.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | float | None = None

    def __post_init__(self) -> None:
        if self.backend is not None and "://" in self.backend:
            self.backend, self.init_method = None, self.backend
        if self.timeout is not None:
            self.timeout = _duration(self.timeout)


def _duration(timeout: object) -> timedelta:
    duration = (
        timedelta(seconds=timeout) if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) else timeout
    )
    if not isinstance(duration, timedelta) or duration <= timedelta(0):
        raise SettingError(
            f"Cannot use InitProcessGroupKwargs(timeout={timeout!r}).",
            "The timeout must be a positive duration.",
            "Pass seconds or a datetime.timedelta.",
        )
    return duration
