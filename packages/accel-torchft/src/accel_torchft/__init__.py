"""Replicas that may die and rejoin while the others continue to train, based on torchft."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__getattr__, __dir__ = lazy_stub(__name__, __file__)
