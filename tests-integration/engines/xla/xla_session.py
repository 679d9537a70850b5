"""The kit's training run, on the device that torch_xla has."""

from __future__ import annotations

from accel_state.process import PartialState
from accel_testing.backends.reference_loop import Training

__all__ = ("XLASession",)


class XLASession(Training):
    """The kit's loop on an XLA device."""

    def start(self) -> None:
        PartialState()
