"""Replicas that may die and come back while the others train on, over torchft."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__getattr__, __dir__ = lazy_stub(__name__, __file__)
