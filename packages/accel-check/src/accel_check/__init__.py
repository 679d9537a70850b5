"""Checks whether a training loop computes on several processes what one computes, and continues exactly."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
