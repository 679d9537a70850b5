"""What is found at the old address `accelerate.optimizer`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_ops.tree import honor_type as honor_type
    from accel_plugins.wrapped.optimizer import AcceleratedOptimizer
    from accel_state.availability import is_lomo_available as is_lomo_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.gradient import GradientState as GradientState
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.run_state import AcceleratorState as AcceleratorState
    from accelerate.legacy.weights import move_to_device, patch_optimizer_step

__all__ = ("AcceleratedOptimizer", "move_to_device", "patch_optimizer_step")

serve(__name__)
