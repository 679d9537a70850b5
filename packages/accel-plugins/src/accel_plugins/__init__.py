"""The backend interface for distributed training, its built-in backends, and the test kit for backends."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__getattr__, __dir__ = lazy_stub(__name__, __file__)
