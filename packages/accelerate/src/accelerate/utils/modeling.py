"""What is found at the old address `accelerate.utils.modeling`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.align import align_module_device, has_offloaded_params
    from accel_bigmodel.budget import get_balanced_memory, get_max_memory
    from accel_bigmodel.byte_counts import convert_file_size_to_int
    from accel_bigmodel.device_map import check_device_map, check_device_same, clean_device_map, infer_auto_device_map
    from accel_bigmodel.export import get_state_dict_from_offload, get_state_dict_offloaded_model
    from accel_bigmodel.fallback import fallback_allocate, get_module_size_with_ties
    from accel_bigmodel.load import load_checkpoint_in_model, load_offloaded_weights, load_state_dict
    from accel_bigmodel.offload import load_offloaded_weight as load_offloaded_weight
    from accel_bigmodel.offload import offload_weight as offload_weight
    from accel_bigmodel.offload_index import save_offload_index as save_offload_index
    from accel_bigmodel.place import set_module_tensor_to_device
    from accel_bigmodel.sizes import (
        calculate_maximum_sizes,
        compute_module_sizes,
        compute_module_total_buffer_size,
        dtype_byte_size,
        get_max_layer_size,
        get_module_leaves,
        get_non_persistent_buffers,
        named_module_tensors,
    )
    from accel_bigmodel.tied import (
        check_tied_parameters_in_config,
        check_tied_parameters_on_same_device,
        find_tied_parameters,
        id_tensor_storage,
        retie_parameters,
    )
    from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_NAME as WEIGHTS_NAME
    from accel_plugins.precision.config import AutocastKwargs as AutocastKwargs
    from accel_state.availability import is_hpu_available as is_hpu_available
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_mps_available as is_mps_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_peft_available as is_peft_available
    from accel_state.availability import is_sdaa_available as is_sdaa_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.availability import is_tqdm_available as is_tqdm_available
    from accel_state.availability import is_xpu_available as is_xpu_available
    from accel_state.console import tqdm as tqdm
    from accel_state.labels import CustomDtype as CustomDtype
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.memory import clear_device_cache as clear_device_cache
    from accel_state.run_state import AcceleratorState as AcceleratorState
    from accel_state.settings.versions import is_torch_version as is_torch_version
    from accelerate.legacy.models import is_peft_model
    from accelerate.legacy.precision import get_grad_scaler, get_mixed_precision_context_manager

__all__ = (
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
)

serve(__name__)
