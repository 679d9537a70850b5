"""Sessions of the conformance kit on another device than the CPU; a suite names one in its fixture `driver`."""

from __future__ import annotations

from accel_plugins.testing.reference_loop import Session
from accel_state.process import PartialState

__all__ = ("CUDASession", "SimulatedSession")


class CUDASession(Session):
    """Each process works on a GPU of its own."""

    def start(self) -> None:
        PartialState()


class SimulatedSession(Session):
    """Each process works on a device made of CPU memory, which refuses to mix its tensors with others."""

    def start(self) -> None:
        # Importing it makes the device known to torch, which counts devices at the first backward pass.
        import accel_state.testing.simulated_device  # noqa: F401
        from accel_state.testing.simulated_device import MODULE

        MODULE.plug_in(1, 2**30)
        PartialState()
