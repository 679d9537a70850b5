"""Weight files: their names, and writing and reading them in safetensors or torch format, in one file or in shards."""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__getattr__, __dir__ = lazy_stub(__name__, __file__)
