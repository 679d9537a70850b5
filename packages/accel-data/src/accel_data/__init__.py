"""Data loaders that give each process its own shard, dispatch from one process, and resume exactly."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_stub(__name__, __file__)
