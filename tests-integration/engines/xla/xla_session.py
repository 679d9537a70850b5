"""The kit's training run, on the device that torch_xla has."""

from __future__ import annotations

from accel_plugins.testing.reference_loop import Session
from accel_state.process import PartialState

__all__ = ("XLASession",)


class XLASession(Session):
    """The kit's loop on an XLA device."""

    def start(self) -> None:
        PartialState()
