"""Collectives on nested data and random-number state, with named errors instead of hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_ops.agreement import StoreBarrier as StoreBarrier
    from accel_ops.agreement import all_agree as all_agree
    from accel_ops.agreement import raise_on_any_rank as raise_on_any_rank
    from accel_ops.checked_call import recent_calls as recent_calls
    from accel_ops.checked_call import where_is_everyone as where_is_everyone
    from accel_ops.collectives import all_to_all as all_to_all
    from accel_ops.collectives import broadcast as broadcast
    from accel_ops.collectives import gather as gather
    from accel_ops.collectives import scatter as scatter
    from accel_ops.conversion import ConvertOutputsToFp32 as ConvertOutputsToFp32
    from accel_ops.conversion import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_ops.conversion import convert_to_fp32 as convert_to_fp32
    from accel_ops.conversion import send_to_device as send_to_device
    from accel_ops.objects import broadcast_object_list as broadcast_object_list
    from accel_ops.objects import gather_object as gather_object
    from accel_ops.reduction import reduce as reduce
    from accel_ops.reduction import reduce_scatter as reduce_scatter
    from accel_ops.rng import set_seed as set_seed
    from accel_ops.rng import synchronize_rng_state as synchronize_rng_state
    from accel_ops.rng import synchronize_rng_states as synchronize_rng_states
    from accel_ops.shape import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel_ops.shape import concatenate as concatenate
    from accel_ops.shape import pad_across_processes as pad_across_processes
    from accel_ops.shape import pad_input_tensors as pad_input_tensors
    from accel_ops.shape import slice_tensors as slice_tensors
    from accel_ops.tree import TensorInformation as TensorInformation
    from accel_ops.tree import find_batch_size as find_batch_size
    from accel_ops.tree import find_device as find_device
    from accel_ops.tree import get_data_structure as get_data_structure
    from accel_ops.tree import get_shape as get_shape
    from accel_ops.tree import honor_type as honor_type
    from accel_ops.tree import initialize_tensors as initialize_tensors
    from accel_ops.tree import is_namedtuple as is_namedtuple
    from accel_ops.tree import is_tensor_information as is_tensor_information
    from accel_ops.tree import is_torch_tensor as is_torch_tensor
    from accel_ops.tree import listify as listify
    from accel_ops.tree import recursively_apply as recursively_apply
    from accel_state.errors import CollectiveError as CollectiveError
    from accel_state.errors import SettingError as SettingError
    from accel_state.errors import ShapeMismatch as ShapeMismatch
    from accel_state.errors import UnknownKind as UnknownKind

__all__ = (
    "CannotPadNestedTensorWarning",
    "CollectiveError",
    "ConvertOutputsToFp32",
    "SettingError",
    "ShapeMismatch",
    "StoreBarrier",
    "TensorInformation",
    "UnknownKind",
    "all_agree",
    "all_to_all",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "raise_on_any_rank",
    "recent_calls",
    "recursively_apply",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "where_is_everyone",
)

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_ops.agreement": ("StoreBarrier", "all_agree", "raise_on_any_rank"),
        "accel_ops.checked_call": ("recent_calls", "where_is_everyone"),
        "accel_ops.collectives": ("all_to_all", "broadcast", "gather", "scatter"),
        "accel_ops.conversion": (
            "ConvertOutputsToFp32",
            "convert_outputs_to_fp32",
            "convert_to_fp32",
            "send_to_device",
        ),
        "accel_ops.objects": ("broadcast_object_list", "gather_object"),
        "accel_ops.reduction": ("reduce", "reduce_scatter"),
        "accel_ops.rng": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
        "accel_ops.shape": (
            "CannotPadNestedTensorWarning",
            "concatenate",
            "pad_across_processes",
            "pad_input_tensors",
            "slice_tensors",
        ),
        "accel_ops.tree": (
            "TensorInformation",
            "find_batch_size",
            "find_device",
            "get_data_structure",
            "get_shape",
            "honor_type",
            "initialize_tensors",
            "is_namedtuple",
            "is_tensor_information",
            "is_torch_tensor",
            "listify",
            "recursively_apply",
        ),
        "accel_state.errors": ("CollectiveError", "SettingError", "ShapeMismatch", "UnknownKind"),
    },
)
