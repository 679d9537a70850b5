"""What is found at the old address `accelerate.utils.dataclasses`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.quantize_config import BnbQuantizationConfig
    from accel_data.config import DataLoaderConfiguration
    from accel_ops.tree import TensorInformation
    from accel_plugins.blocks import get_module_class_from_name
    from accel_plugins.checkpoint.config import ProjectConfiguration
    from accel_plugins.ddp.config import DistributedDataParallelKwargs
    from accel_plugins.ddp.hook_types import DDPCommunicationHookType
    from accel_plugins.deepspeed.config import DeepSpeedPlugin
    from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
    from accel_plugins.megatron.architecture import (
        MODEL_CONFIGS_TO_MEGATRON_PARSERS,
        add_model_config_to_megatron_parser,
        parse_bert_config,
        parse_glm4_moe_config,
        parse_gpt2_config,
        parse_llama_config,
        parse_t5_config,
    )
    from accel_plugins.megatron.config import MegatronLMPlugin
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
    from accel_plugins.precision.fp8_config import (
        AmaxComputeAlgorithm,
        AORecipeKwargs,
        FP8Format,
        FP8RecipeKwargs,
        MSAMPRecipeKwargs,
        OptLevel,
        TERecipeKwargs,
    )
    from accel_plugins.precision.fp8_library import FP8BackendType
    from accel_plugins.transforms.compile_config import TorchDynamoPlugin
    from accel_plugins.transforms.tensor_parallel_config import TorchTensorParallelPlugin
    from accel_state.availability import is_cuda_available as is_cuda_available
    from accel_state.availability import is_hpu_available as is_hpu_available
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_msamp_available as is_msamp_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_neuron_available as is_neuron_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_rocm_available as is_rocm_available
    from accel_state.availability import is_torchao_available as is_torchao_available
    from accel_state.availability import is_transformer_engine_available as is_transformer_engine_available
    from accel_state.availability import is_xpu_available as is_xpu_available
    from accel_state.environment import parse_flag_from_env as parse_flag_from_env
    from accel_state.environment import str_to_bool as str_to_bool
    from accel_state.gradient import GradientAccumulationPlugin
    from accel_state.kwargs import InitProcessGroupKwargs, KwargsHandler
    from accel_state.labels import (
        Backend,
        BaseEnum,
        ComputeEnvironment,
        CustomDtype,
        DistributedType,
        DynamoBackend,
        EnumWithContains,
        PrecisionType,
        RNGType,
        SageMakerDistributedType,
    )
    from accel_state.mesh_handlers import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
    from accel_state.mesh_handlers import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
    from accel_state.mesh_handlers import (
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
    )
    from accel_state.mesh_handlers import (
        DeepSpeedSequenceParallelConfig,
        TorchContextParallelConfig,
        TorchTensorParallelConfig,
    )
    from accel_state.settings.versions import compare_versions as compare_versions
    from accel_state.settings.versions import is_torch_version as is_torch_version
    from accel_torch.profile import ProfileKwargs, ProfilerActivity
    from accel_tracking.registry import LoggerType

__all__ = (
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
    "AORecipeKwargs",
    "AmaxComputeAlgorithm",
    "AutocastKwargs",
    "Backend",
    "BaseEnum",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "FP8BackendType",
    "FP8Format",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "OptLevel",
    "PrecisionType",
    "ProfileKwargs",
    "ProfilerActivity",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "add_model_config_to_megatron_parser",
    "get_module_class_from_name",
    "parse_bert_config",
    "parse_glm4_moe_config",
    "parse_gpt2_config",
    "parse_llama_config",
    "parse_t5_config",
)

serve(__name__)
