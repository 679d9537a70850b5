"""What is found at the old address `accelerate.utils`.

Written by tools/gen_alias.py from accelerate/names.py: change that table, not this file.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.utils import constants as constants
    from accelerate.utils import dataclasses as dataclasses
    from accelerate.utils import modeling as modeling
    from accelerate.utils import operations as operations
    from accelerate.utils import other as other
    from accelerate.utils import versions as versions
    from accelerate.utils.constants import *
    from accelerate.utils.dataclasses import *
    from accelerate.utils.modeling import *
    from accelerate.utils.operations import *
    from accelerate.utils.other import *
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
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "AutocastKwargs",
    "BaseEnum",
    "ComputeEnvironment",
    "ConvertOutputsToFp32",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
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
    "convert_bytes",
    "convert_file_size_to_int",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "gather",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "id_tensor_storage",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_compiled_module",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xpu_tensor",
    "listify",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "tqdm",
)

serve(__name__)
