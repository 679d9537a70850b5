"""A backend that sends only the largest gradients and makes up for the rest later."""

from __future__ import annotations

from accel_backend_example.config import ExampleConfig

__all__ = ("ExampleConfig",)
