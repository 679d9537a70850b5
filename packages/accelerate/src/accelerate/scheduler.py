"""What is found at the old address `accelerate.scheduler`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_plugins.wrapped.scheduler import AcceleratedScheduler
    from accel_state.gradient import GradientState as GradientState
    from accel_state.run_state import AcceleratorState as AcceleratorState

__all__ = ("AcceleratedScheduler",)

serve(__name__)
