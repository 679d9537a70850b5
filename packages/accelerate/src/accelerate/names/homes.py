"""The home of every name: which old module has it, and which of our modules it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ("NAMES",)

NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "accelerate": {
        "accelerate.accelerator": "Accelerator",
        "accelerate.big_modeling": """
            cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights init_on_device
            load_checkpoint_and_dispatch
        """,
        "accelerate.data_loader": "skip_first_batches",
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs
            DistributedType FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs ParallelismConfig ProjectConfiguration TorchDynamoPlugin infer_auto_device_map
            load_checkpoint_in_model synchronize_rng_states
        """,
    },
    "accelerate.accelerator": {"accel_torch.accelerator": "Accelerator"},
    "accelerate.big_modeling": {
        "accel_bigmodel.casting": "attach_layerwise_casting_hooks",
        "accel_bigmodel.cpu_hooks": "cpu_offload_with_hook",
        "accel_bigmodel.dispatch": "cpu_offload disk_offload dispatch_model",
        "accel_bigmodel.load": "load_checkpoint_and_dispatch",
        "accel_bigmodel.meta": "init_empty_weights init_on_device",
    },
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
    "accelerate.hooks": {
        "accel_bigmodel.align": "AlignDevicesHook",
        "accel_bigmodel.attach": """
            attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook
        """,
        "accel_bigmodel.casting": "LayerwiseCastingHook",
        "accel_bigmodel.cpu_hooks": "CpuOffload UserCpuOffloadHook",
        "accel_bigmodel.hooks": """
            ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules
        """,
    },
    "accelerate.logging": {"accel_state.logging": "MultiProcessAdapter get_logger"},
    "accelerate.optimizer": {"accel_plugins.wrapped.optimizer": "AcceleratedOptimizer"},
    "accelerate.parallelism_config": {"accel_state.mesh": "ParallelismConfig"},
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
        "accelerate.parallelism_config": "*",
        "accelerate.utils.constants": "*",
        "accelerate.utils.dataclasses": "*",
        "accelerate.utils.environment": "*",
        "accelerate.utils.modeling": "*",
        "accelerate.utils.offload": "*",
        "accelerate.utils.operations": "*",
        "accelerate.utils.other": "*",
        "accelerate.utils.random": "*",
        "accelerate.utils.tqdm": "*",
        "accelerate.utils.versions": "*",
    },
    "accelerate.utils.constants": {
        "accel_bigmodel.casting": "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
        "accel_bigmodel.weight_files.names": """
            MODEL_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME
            WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        """,
        "accel_plugins.checkpoint.files": """
            FSDP_MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        """,
        "accel_state.mesh_handlers": """
            BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
            BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        """,
    },
    "accelerate.utils.dataclasses": {
        "accel_data.config": "DataLoaderConfiguration",
        "accel_ops.tree": "TensorInformation",
        "accel_plugins.blocks": "get_module_class_from_name",
        "accel_plugins.checkpoint.config": "ProjectConfiguration",
        "accel_plugins.ddp.config": "DistributedDataParallelKwargs",
        "accel_plugins.ddp.hook_types": "DDPCommunicationHookType",
        "accel_plugins.fsdp.config": "FullyShardedDataParallelPlugin",
        "accel_plugins.precision.config": "AutocastKwargs GradScalerKwargs",
        "accel_plugins.transforms.compile_config": "TorchDynamoPlugin",
        "accel_state.gradient": "GradientAccumulationPlugin",
        "accel_state.kwargs": "InitProcessGroupKwargs KwargsHandler",
        "accel_state.labels": """
            BaseEnum ComputeEnvironment CustomDtype DistributedType DynamoBackend EnumWithContains PrecisionType RNGType
            SageMakerDistributedType
        """,
        "accel_state.mesh_handlers": """
            DeepSpeedSequenceParallelConfig TorchContextParallelConfig TorchTensorParallelConfig
        """,
        "accel_tracking.registry": "LoggerType",
    },
    "accelerate.utils.environment": {
        "accel_state.affinity": "override_numa_affinity set_numa_affinity",
        "accel_state.devices.cuda": "check_cuda_fp8_capability",
    },
    "accelerate.utils.modeling": {
        "accel_bigmodel.align": "align_module_device has_offloaded_params",
        "accel_bigmodel.budget": "get_balanced_memory get_max_memory",
        "accel_bigmodel.byte_counts": "convert_file_size_to_int",
        "accel_bigmodel.device_map": "check_device_map check_device_same clean_device_map infer_auto_device_map",
        "accel_bigmodel.export": "get_state_dict_from_offload get_state_dict_offloaded_model",
        "accel_bigmodel.load": "load_checkpoint_in_model load_offloaded_weights",
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
    "accelerate.utils.offload": {
        "accel_bigmodel.offload": """
            OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
            offload_state_dict offload_weight
        """,
        "accel_bigmodel.offload_index": "save_offload_index",
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
        "accel_plugins.blocks": "has_repeated_blocks is_repeated_blocks",
        "accel_plugins.transforms.compile": "compile_regions has_compiled_regions",
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
