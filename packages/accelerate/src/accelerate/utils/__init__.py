"""What is found at the old address `accelerate.utils`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.utils import constants as constants
    from accelerate.utils import dataclasses as dataclasses
    from accelerate.utils import environment as environment
    from accelerate.utils import modeling as modeling
    from accelerate.utils import operations as operations
    from accelerate.utils import other as other
    from accelerate.utils import random as random
    from accelerate.utils import versions as versions
    from accelerate.utils.constants import *
    from accelerate.utils.dataclasses import *
    from accelerate.utils.environment import *
    from accelerate.utils.modeling import *
    from accelerate.utils.operations import *
    from accelerate.utils.other import *
    from accelerate.utils.random import *
    from accelerate.utils.tqdm import *
    from accelerate.utils.versions import *

__all__ = (
    "FSDP_MODEL_NAME",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TENSOR_INT_TO_DTYPE",
    "TENSOR_TYPE_TO_INT",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "AutocastKwargs",
    "BaseEnum",
    "CannotPadNestedTensorWarning",
    "ComputeEnvironment",
    "ConvertOutputsToFp32",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "calculate_maximum_sizes",
    "chained_operation",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "concatenate",
    "convert_bytes",
    "convert_file_size_to_int",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "dtype_byte_size",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "find_tied_parameters",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_balanced_memory",
    "get_data_structure",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_non_persistent_buffers",
    "get_shape",
    "honor_type",
    "id_tensor_storage",
    "ignorant_find_batch_size",
    "infer_auto_device_map",
    "initialize_tensors",
    "is_compiled_module",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xpu_tensor",
    "listify",
    "named_module_tensors",
    "override_numa_affinity",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "retie_parameters",
    "send_to_device",
    "set_module_tensor_to_device",
    "set_numa_affinity",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "verify_operation",
    "wait_for_everyone",
)

serve(__name__)
