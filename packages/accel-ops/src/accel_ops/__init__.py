"""Collectives on nested data and random-number state, with named errors instead of hangs."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_stub(__name__, __file__)
