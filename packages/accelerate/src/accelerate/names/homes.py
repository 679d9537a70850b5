"""The home of every name: which old module has it, and which of our modules it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ("NAMES",)

NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "accelerate": {
        "accelerate.accelerator": "Accelerator",
        "accelerate.big_modeling": "init_empty_weights init_on_device",
        "accelerate.data_loader": "skip_first_batches",
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs
            DistributedType GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs ProjectConfiguration
            infer_auto_device_map synchronize_rng_states
        """,
    },
    "accelerate.accelerator": {"accel_torch.accelerator": "Accelerator"},
    "accelerate.big_modeling": {"accel_bigmodel.meta": "init_empty_weights init_on_device"},
    "accelerate.commands": {},
    "accelerate.commands.accelerate_cli": {"accelerate.legacy.commands": "main"},
    "accelerate.commands.env": {"accelerate.legacy.commands": "env_command env_command_parser main=env_main"},
    "accelerate.commands.launch": {
        "accelerate.legacy.commands": "launch_command launch_command_parser main=launch_main"
    },
    "accelerate.data_loader": {
        "accel_data.adapter": "DataLoaderAdapter",
        "accel_data.dispatcher": "DataLoaderDispatcher",
        "accel_data.iterable": "IterableDatasetShard",
        "accel_data.loader": "DataLoaderShard",
        "accel_data.prepare": "get_sampler prepare_data_loader",
        "accel_data.prepared": "DataLoaderStateMixin",
        "accel_data.samplers": "BatchSamplerShard SeedableRandomSampler SkipBatchSampler",
        "accel_data.skip": "SkipDataLoader skip_first_batches",
    },
    "accelerate.logging": {"accel_state.logging": "MultiProcessAdapter get_logger"},
    "accelerate.optimizer": {"accel_plugins.wrapped.optimizer": "AcceleratedOptimizer"},
    "accelerate.scheduler": {"accel_plugins.wrapped.scheduler": "AcceleratedScheduler"},
    "accelerate.state": {
        "accel_state.gradient": "GradientState",
        "accel_state.process": "PartialState do_nothing",
        "accel_state.run_state": "AcceleratorState is_initialized",
        "accel_state.shared": "SharedDict ThreadLocalSharedDict",
    },
    "accelerate.tracking": {
        "accel_tracking.base": "GeneralTracker on_main_process",
        "accel_tracking.registry": "filter_trackers get_available_trackers register_tracker_class",
        "accel_tracking.trackers.aim": "AimTracker",
        "accel_tracking.trackers.clearml": "ClearMLTracker",
        "accel_tracking.trackers.comet_ml": "CometMLTracker",
        "accel_tracking.trackers.dvclive": "DVCLiveTracker",
        "accel_tracking.trackers.mlflow": "MLflowTracker",
        "accel_tracking.trackers.swanlab": "SwanLabTracker",
        "accel_tracking.trackers.tensorboard": "TensorBoardTracker",
        "accel_tracking.trackers.trackio": "TrackioTracker",
        "accel_tracking.trackers.wandb": "WandBTracker",
        "accelerate.legacy.trackers": "LOGGER_TYPE_TO_CLASS",
    },
    "accelerate.utils": {
        "accelerate.utils.constants": "*",
        "accelerate.utils.dataclasses": "*",
        "accelerate.utils.environment": "*",
        "accelerate.utils.modeling": "*",
        "accelerate.utils.operations": "*",
        "accelerate.utils.other": "*",
        "accelerate.utils.random": "*",
        "accelerate.utils.tqdm": "*",
        "accelerate.utils.versions": "*",
    },
    "accelerate.utils.constants": {
        "accel_bigmodel.weight_files.names": """
            MODEL_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME
            WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        """,
        "accel_plugins.checkpoint.files": """
            FSDP_MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        """,
    },
    "accelerate.utils.dataclasses": {
        "accel_data.config": "DataLoaderConfiguration",
        "accel_ops.tree": "TensorInformation",
        "accel_plugins.checkpoint.config": "ProjectConfiguration",
        "accel_plugins.ddp.config": "DistributedDataParallelKwargs",
        "accel_plugins.ddp.hook_types": "DDPCommunicationHookType",
        "accel_plugins.precision.config": "AutocastKwargs GradScalerKwargs",
        "accel_state.gradient": "GradientAccumulationPlugin",
        "accel_state.kwargs": "InitProcessGroupKwargs KwargsHandler",
        "accel_state.labels": """
            BaseEnum ComputeEnvironment CustomDtype DistributedType DynamoBackend EnumWithContains PrecisionType RNGType
            SageMakerDistributedType
        """,
        "accel_tracking.registry": "LoggerType",
    },
    "accelerate.utils.environment": {"accel_state.affinity": "override_numa_affinity set_numa_affinity"},
    "accelerate.utils.modeling": {
        "accel_bigmodel.budget": "get_balanced_memory get_max_memory",
        "accel_bigmodel.byte_counts": "convert_file_size_to_int",
        "accel_bigmodel.device_map": "check_device_map check_device_same clean_device_map infer_auto_device_map",
        "accel_bigmodel.place": "set_module_tensor_to_device",
        "accel_bigmodel.sizes": """
            calculate_maximum_sizes compute_module_sizes compute_module_total_buffer_size dtype_byte_size
            get_max_layer_size get_module_leaves get_non_persistent_buffers named_module_tensors
        """,
        "accel_bigmodel.tied": """
            check_tied_parameters_in_config check_tied_parameters_on_same_device find_tied_parameters id_tensor_storage
            retie_parameters
        """,
    },
    "accelerate.utils.operations": {
        "accel_ops.checked": "DistributedOperationException chained_operation verify_operation",
        "accel_ops.collectives": "broadcast gather reduce",
        "accel_ops.dtype": "ConvertOutputsToFp32 convert_outputs_to_fp32 convert_to_fp32",
        "accel_ops.measure": """
            find_batch_size find_device get_data_structure get_shape ignorant_find_batch_size initialize_tensors
            is_torch_xpu_tensor listify
        """,
        "accel_ops.move": "send_to_device",
        "accel_ops.objects": "broadcast_object_list gather_object",
        "accel_ops.replicate": """
            TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT copy_tensor_to_devices gather_tensor_shape
        """,
        "accel_ops.shape": """
            CannotPadNestedTensorWarning concatenate pad_across_processes pad_input_tensors slice_tensors
        """,
        "accel_ops.tree": "honor_type is_namedtuple is_tensor_information is_torch_tensor recursively_apply",
    },
    "accelerate.utils.other": {
        "accel_bigmodel.byte_counts": "convert_bytes",
        "accel_plugins.wrapped.unwrap": "extract_model_from_parallel is_compiled_module",
        "accel_state.process": "wait_for_everyone",
    },
    "accelerate.utils.random": {"accel_ops.rng": "set_seed synchronize_rng_state synchronize_rng_states"},
    "accelerate.utils.tqdm": {"accel_state.console": "tqdm"},
    "accelerate.utils.versions": {"accel_state.settings.versions": "is_torch_version"},
}
"""Old module -> source -> names; `old=ours` where ours is called otherwise.

A source is one of our modules or, to say a thing once, another old module; `*` is everything that one has.
"""
