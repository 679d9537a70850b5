"""What scripts and libraries find at the old address `accelerate`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve
from accelerate.installation import check_files
from accelerate.loggers import join_loggers

if TYPE_CHECKING:
    from accel_bigmodel.cpu_hooks import cpu_offload_with_hook
    from accel_bigmodel.device_map import infer_auto_device_map
    from accel_bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model
    from accel_bigmodel.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from accel_bigmodel.meta import init_empty_weights, init_on_device
    from accel_bigmodel.pipeline import prepare_pippy
    from accel_bigmodel.quantize_config import BnbQuantizationConfig
    from accel_data.config import DataLoaderConfiguration
    from accel_data.skip import skip_first_batches
    from accel_ops.rng import synchronize_rng_states
    from accel_plugins.checkpoint.config import ProjectConfiguration
    from accel_plugins.ddp.config import DistributedDataParallelKwargs
    from accel_plugins.ddp.hook_types import DDPCommunicationHookType
    from accel_plugins.deepspeed.config import DeepSpeedPlugin
    from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
    from accel_plugins.precision.fp8_config import FP8RecipeKwargs
    from accel_plugins.transforms.compile_config import TorchDynamoPlugin
    from accel_plugins.transforms.tensor_parallel_config import TorchTensorParallelPlugin
    from accel_state.availability import is_rich_available
    from accel_state.gradient import GradientAccumulationPlugin
    from accel_state.kwargs import InitProcessGroupKwargs
    from accel_state.labels import DistributedType
    from accel_state.memory import find_executable_batch_size
    from accel_state.mesh import ParallelismConfig
    from accel_state.process import PartialState
    from accel_torch.accelerator import Accelerator
    from accel_torch.profile import ProfileKwargs
    from accelerate import accelerator as accelerator
    from accelerate import big_modeling as big_modeling
    from accelerate import checkpointing as checkpointing
    from accelerate import commands as commands
    from accelerate import data_loader as data_loader
    from accelerate import hooks as hooks
    from accelerate import inference as inference
    from accelerate import launchers as launchers
    from accelerate import local_sgd as local_sgd
    from accelerate import logging as logging
    from accelerate import memory_utils as memory_utils
    from accelerate import optimizer as optimizer
    from accelerate import parallelism_config as parallelism_config
    from accelerate import scheduler as scheduler
    from accelerate import state as state
    from accelerate import tracking as tracking
    from accelerate import utils as utils
    from accelerate.legacy.launching import debug_launcher, notebook_launcher

__all__ = (
    "Accelerator",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "skip_first_batches",
    "synchronize_rng_states",
)

__version__ = "1.15.0+accel.1"

check_files(__path__[0])
join_loggers()
serve(__name__)
