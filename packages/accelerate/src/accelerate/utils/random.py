"""What is found at the old address `accelerate.utils.random`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_ops.rng import set_seed, synchronize_rng_state, synchronize_rng_states
    from accel_state.availability import is_hpu_available as is_hpu_available
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_neuron_available as is_neuron_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_sdaa_available as is_sdaa_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.availability import is_xpu_available as is_xpu_available
    from accel_state.labels import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.labels import RNGType as RNGType
    from accel_state.run_state import AcceleratorState as AcceleratorState

__all__ = ("set_seed", "synchronize_rng_state", "synchronize_rng_states")

serve(__name__)
