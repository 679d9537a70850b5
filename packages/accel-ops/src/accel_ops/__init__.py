"""Collectives on nested data that raise typed errors instead of hanging, and random-number state."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_stub(__name__, __file__)
