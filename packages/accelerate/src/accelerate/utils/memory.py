"""What is found at the old address `accelerate.utils.memory`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.availability import is_cuda_available as is_cuda_available
    from accel_state.availability import is_hpu_available as is_hpu_available
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_mps_available as is_mps_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_neuron_available as is_neuron_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_sdaa_available as is_sdaa_available
    from accel_state.availability import is_xpu_available as is_xpu_available
    from accel_state.memory import (
        clear_device_cache,
        find_executable_batch_size,
        release_memory,
        should_reduce_batch_size,
    )

__all__ = ("clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size")

serve(__name__)
