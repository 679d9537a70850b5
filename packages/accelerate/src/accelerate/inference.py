"""What is found at the old address `accelerate.inference`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.byte_counts import convert_bytes as convert_bytes
    from accel_bigmodel.device_map import infer_auto_device_map as infer_auto_device_map
    from accel_bigmodel.pipeline import (
        build_pipeline,
        find_pippy_batch_size,
        generate_device_map,
        pippy_forward,
        prepare_pippy,
    )
    from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from accel_ops.measure import ignorant_find_batch_size as ignorant_find_batch_size
    from accel_ops.move import send_to_device as send_to_device
    from accel_ops.replicate import copy_tensor_to_devices as copy_tensor_to_devices
    from accel_ops.shape import pad_input_tensors as pad_input_tensors
    from accel_state.availability import is_pippy_available as is_pippy_available
    from accel_state.process import PartialState as PartialState

__all__ = ("build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy")

serve(__name__)
