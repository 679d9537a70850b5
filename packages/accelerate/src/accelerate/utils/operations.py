"""What is found at the old address `accelerate.utils.operations`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_ops.checked import DistributedOperationException, chained_operation, verify_operation
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
    from accel_ops.objects import broadcast_object_list, gather_object
    from accel_ops.replicate import TENSOR_INT_TO_DTYPE, TENSOR_TYPE_TO_INT, copy_tensor_to_devices, gather_tensor_shape
    from accel_ops.shape import (
        CannotPadNestedTensorWarning,
        concatenate,
        pad_across_processes,
        pad_input_tensors,
        slice_tensors,
    )
    from accel_ops.tree import TensorInformation as TensorInformation
    from accel_ops.tree import honor_type, is_namedtuple, is_tensor_information, is_torch_tensor, recursively_apply
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_torch_distributed_available as is_torch_distributed_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.labels import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.process import PartialState as PartialState
    from accel_state.run_state import AcceleratorState as AcceleratorState
    from accel_state.settings.versions import is_torch_version as is_torch_version
    from accelerate.legacy.deepspeed import GatheredParameters

__all__ = (
    "TENSOR_INT_TO_DTYPE",
    "TENSOR_TYPE_TO_INT",
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "gather_tensor_shape",
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
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
)

serve(__name__)
