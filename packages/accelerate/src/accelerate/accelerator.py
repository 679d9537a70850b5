"""What is found at the old address `accelerate.accelerator`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.align import has_offloaded_params as has_offloaded_params
    from accel_bigmodel.export import get_state_dict_offloaded_model as get_state_dict_offloaded_model
    from accel_bigmodel.weight_files.names import MODEL_NAME as MODEL_NAME
    from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
    from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_NAME as WEIGHTS_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
    from accel_data.config import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
    from accel_data.prepare import prepare_data_loader as prepare_data_loader
    from accel_data.skip import skip_first_batches as skip_first_batches
    from accel_ops.collectives import gather as gather
    from accel_ops.collectives import reduce as reduce
    from accel_ops.dtype import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_ops.objects import gather_object as gather_object
    from accel_ops.shape import pad_across_processes as pad_across_processes
    from accel_ops.tree import recursively_apply as recursively_apply
    from accel_plugins.checkpoint.config import ProjectConfiguration as ProjectConfiguration
    from accel_plugins.checkpoint.files import SCALER_NAME as SCALER_NAME
    from accel_plugins.ddp.config import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_plugins.precision.config import AutocastKwargs as AutocastKwargs
    from accel_plugins.precision.config import GradScalerKwargs as GradScalerKwargs
    from accel_plugins.transforms.compile import compile_regions as compile_regions
    from accel_plugins.transforms.compile_config import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_plugins.wrapped.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accel_plugins.wrapped.scheduler import AcceleratedScheduler as AcceleratedScheduler
    from accel_plugins.wrapped.unwrap import extract_model_from_parallel as extract_model_from_parallel
    from accel_plugins.wrapped.unwrap import is_compiled_module as is_compiled_module
    from accel_state.availability import is_bf16_available as is_bf16_available
    from accel_state.availability import (
        is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    )
    from accel_state.availability import is_deepspeed_available as is_deepspeed_available
    from accel_state.availability import is_lomo_available as is_lomo_available
    from accel_state.availability import is_megatron_lm_available as is_megatron_lm_available
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_msamp_available as is_msamp_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.availability import is_torchao_available as is_torchao_available
    from accel_state.availability import is_transformer_engine_available as is_transformer_engine_available
    from accel_state.availability import is_xpu_available as is_xpu_available
    from accel_state.environment import check_os_kernel as check_os_kernel
    from accel_state.environment import parse_choice_from_env as parse_choice_from_env
    from accel_state.gradient import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_state.gradient import GradientState as GradientState
    from accel_state.kwargs import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_state.kwargs import KwargsHandler as KwargsHandler
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.labels import DynamoBackend as DynamoBackend
    from accel_state.labels import PrecisionType as PrecisionType
    from accel_state.labels import RNGType as RNGType
    from accel_state.logging import get_logger as get_logger
    from accel_state.memory import release_memory as release_memory
    from accel_state.mesh import ParallelismConfig as ParallelismConfig
    from accel_state.objects import get_pretty_name as get_pretty_name
    from accel_state.process import PartialState as PartialState
    from accel_state.process import wait_for_everyone as wait_for_everyone
    from accel_state.run_state import AcceleratorState as AcceleratorState
    from accel_state.settings.versions import compare_versions as compare_versions
    from accel_state.settings.versions import is_torch_version as is_torch_version
    from accel_torch.accelerator import Accelerator
    from accel_tracking.base import GeneralTracker as GeneralTracker
    from accel_tracking.registry import LoggerType as LoggerType
    from accel_tracking.registry import filter_trackers as filter_trackers
    from accelerate.legacy.trackers import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS

__all__ = ("Accelerator",)

serve(__name__)
