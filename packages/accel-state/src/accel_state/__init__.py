"""The rank, device, settings and transport of each process of a run."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_stub(__name__, __file__)
