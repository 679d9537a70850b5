"""What is found at the old address `accelerate.utils.operations`.

Written by tools/gen_alias.py from accelerate/names.py: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_ops.collectives import broadcast, gather, reduce
    from accel_ops.dtype import ConvertOutputsToFp32, convert_outputs_to_fp32, convert_to_fp32
    from accel_ops.measure import (
        find_batch_size,
        find_device,
        get_data_structure,
        get_shape,
        ignorant_find_batch_size,
        initialize_tensors,
        is_torch_xpu_tensor,
        listify,
    )
    from accel_ops.move import send_to_device
    from accel_ops.tree import TensorInformation as TensorInformation
    from accel_ops.tree import honor_type, is_namedtuple, is_tensor_information, is_torch_tensor, recursively_apply
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.process import PartialState as PartialState
    from accel_state.run_state import AcceleratorState as AcceleratorState
    from accel_state.settings.versions import is_torch_version as is_torch_version

__all__ = (
    "ConvertOutputsToFp32",
    "broadcast",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "gather",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_xpu_tensor",
    "listify",
    "recursively_apply",
    "reduce",
    "send_to_device",
)

serve(__name__)
