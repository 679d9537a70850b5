"""Replicas that may die and come back while the others train on, over torchft."""

from __future__ import annotations

from accel_torchft.config import TorchFTConfig

__all__ = ("TorchFTConfig",)
