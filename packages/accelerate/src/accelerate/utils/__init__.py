"""What is found at the old address `accelerate.utils`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.parallelism_config import *
    from accelerate.utils import constants as constants
    from accelerate.utils import dataclasses as dataclasses
    from accelerate.utils import environment as environment
    from accelerate.utils import modeling as modeling
    from accelerate.utils import offload as offload
    from accelerate.utils import operations as operations
    from accelerate.utils import other as other
    from accelerate.utils import random as random
    from accelerate.utils import versions as versions
    from accelerate.utils.constants import *
    from accelerate.utils.dataclasses import *
    from accelerate.utils.environment import *
    from accelerate.utils.modeling import *
    from accelerate.utils.offload import *
    from accelerate.utils.operations import *
    from accelerate.utils.other import *
    from accelerate.utils.random import *
    from accelerate.utils.tqdm import *
    from accelerate.utils.versions import *

__all__ = (
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
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
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
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
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "OffloadedWeightsLoader",
    "ParallelismConfig",
    "PrecisionType",
    "PrefixedDataset",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "align_module_device",
    "broadcast",
    "broadcast_object_list",
    "calculate_maximum_sizes",
    "chained_operation",
    "check_cuda_fp8_capability",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compile_regions",
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
    "extract_submodules_state_dict",
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
    "get_module_class_from_name",
    "get_module_leaves",
    "get_non_persistent_buffers",
    "get_shape",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_compiled_regions",
    "has_offloaded_params",
    "has_repeated_blocks",
    "honor_type",
    "id_tensor_storage",
    "ignorant_find_batch_size",
    "infer_auto_device_map",
    "initialize_tensors",
    "is_compiled_module",
    "is_namedtuple",
    "is_repeated_blocks",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xpu_tensor",
    "listify",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "override_numa_affinity",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "retie_parameters",
    "save_offload_index",
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
