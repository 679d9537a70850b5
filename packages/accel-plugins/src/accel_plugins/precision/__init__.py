"""Mixed precision: the interface, and the precisions that torch brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_plugins.precision.base import Precision
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
    from accel_plugins.precision.native import BFloat16, Float16
    from accel_plugins.precision.select import choose

__all__ = ("AutocastKwargs", "BFloat16", "Float16", "GradScalerKwargs", "Precision", "choose")

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_plugins.precision.base": ("Precision",),
        "accel_plugins.precision.config": ("AutocastKwargs", "GradScalerKwargs"),
        "accel_plugins.precision.native": ("BFloat16", "Float16"),
        "accel_plugins.precision.select": ("choose",),
    },
)
