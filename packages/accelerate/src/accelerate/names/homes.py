"""The home of every name: the old module that has it, and this project's module that defines it."""

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
        "accelerate.inference": "prepare_pippy",
        "accelerate.launchers": "debug_launcher notebook_launcher",
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            AutocastKwargs BnbQuantizationConfig DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
            DistributedDataParallelKwargs DistributedType FP8RecipeKwargs FullyShardedDataParallelPlugin
            GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs ParallelismConfig
            ProfileKwargs ProjectConfiguration TorchDynamoPlugin TorchTensorParallelPlugin
            find_executable_batch_size infer_auto_device_map is_rich_available load_checkpoint_in_model
            synchronize_rng_states
        """,
    },
    "accelerate.accelerator": {"accel_torch.accelerator": "Accelerator"},
    "accelerate.big_modeling": {
        "accel_bigmodel.casting": "attach_layerwise_casting_hooks",
        "accel_bigmodel.dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model",
        "accel_bigmodel.load": "load_checkpoint_and_dispatch",
        "accel_bigmodel.meta": "init_empty_weights init_on_device",
    },
    "accelerate.commands": {},
    "accelerate.commands.accelerate_cli": {"accelerate.legacy.commands": "main"},
    "accelerate.commands.config": {
        "accelerate.legacy.commands": "main=config_main",
        "accelerate.legacy.config_classes": "default_config_file load_config_from_file",
    },
    "accelerate.commands.config.config": {"accelerate.legacy.commands": "main=config_main"},
    "accelerate.commands.config.config_args": {
        "accelerate.legacy.config_classes": """
            BaseConfig ClusterConfig SageMakerConfig cache_dir default_config_file default_json_config_file
            default_yaml_config_file hf_cache_home load_config_from_file
        """,
    },
    "accelerate.commands.config.default": {"accelerate.legacy.config_classes": "write_basic_config"},
    "accelerate.commands.env": {"accelerate.legacy.commands": "main=env_main"},
    "accelerate.commands.estimate": {
        "accelerate.legacy.commands": "estimate_command estimate_command_parser main=estimate_main",
        "accelerate.legacy.estimating": """
            check_has_model create_empty_model estimate_training_usage gather_data verify_on_hub
        """,
    },
    "accelerate.commands.launch": {
        "accelerate.legacy.commands": """
            deepspeed_launcher=launch_command launch_command launch_command_parser main=launch_main
            multi_gpu_launcher=launch_command simple_launcher=launch_command tpu_launcher=launch_command
            tpu_pod_launcher=launch_command
        """,
        "accelerate.legacy.launching": "_validate_launch_command=validate_launch_command",
    },
    "accelerate.commands.merge": {"accelerate.legacy.commands": "main=merge_main"},
    "accelerate.commands.test": {"accelerate.legacy.commands": "main=self_test_main"},
    "accelerate.commands.to_fsdp2": {
        "accelerate.legacy.commands": "to_fsdp2_command_parser",
        "accelerate.legacy.fsdp2_configs": """
            convert_config_to_fsdp2 load_config to_fsdp2_command
        """,
    },
    "accelerate.commands.tpu": {
        "accelerate.legacy.commands": "main=tpu_main tpu_command_launcher tpu_command_parser",
    },
    "accelerate.data_loader": {
        "accel_data.adapter": "DataLoaderAdapter",
        "accel_data.dispatch": "DataLoaderDispatcher",
        "accel_data.loader": "DataLoaderShard DataLoaderStateMixin SkipDataLoader",
        "accel_data.order": "SeedableRandomSampler",
        "accel_data.prepare": "get_sampler prepare_data_loader",
        "accel_data.sharding": "BatchSamplerShard SkipBatchSampler",
        "accel_data.skip": "skip_first_batches",
        "accel_data.streams": "IterableDatasetShard",
    },
    "accelerate.hooks": {
        "accel_bigmodel.align": "AlignDevicesHook",
        "accel_bigmodel.casting": "LayerwiseCastingHook",
        "accel_bigmodel.dispatch": "CpuOffload UserCpuOffloadHook attach_align_device_hook",
        "accel_bigmodel.hooks": """
            ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules
        """,
        "accelerate.legacy.big_models": "attach_align_device_hook_on_blocks attach_execution_device_hook",
    },
    "accelerate.inference": {
        "accel_bigmodel.pipeline": """
            build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy
        """,
    },
    "accelerate.launchers": {
        "accel_cli.launch.notebook": "debug_launcher notebook_launcher",
    },
    "accelerate.local_sgd": {"accel_torch.local_sgd": "LocalSGD"},
    "accelerate.logging": {"accel_state.logging": "MultiProcessAdapter get_logger"},
    "accelerate.memory_utils": {},
    "accelerate.optimizer": {
        "accel_plugins.wrapped.optimizer": "AcceleratedOptimizer",
    },
    "accelerate.parallelism_config": {"accel_state.mesh": "ParallelismConfig"},
    "accelerate.scheduler": {"accel_plugins.wrapped.scheduler": "AcceleratedScheduler"},
    "accelerate.state": {
        "accel_state.gradient": "GradientState",
        "accel_state.process": "PartialState do_nothing",
        "accel_state.run_state": "AcceleratorState is_initialized",
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
        "accelerate.utils.ao": "*",
        "accelerate.utils.bnb": "*",
        "accelerate.utils.constants": "*",
        "accelerate.utils.dataclasses": "*",
        "accelerate.utils.deepspeed": "*",
        "accelerate.utils.environment": "*",
        "accelerate.utils.fsdp_utils": "*",
        "accelerate.commands.config.default": "write_basic_config",
        "accelerate.utils.imports": "*",
        "accelerate.utils.launch": "PrepareForLaunch prepare_multi_gpu_env prepare_simple_launcher_cmd_env",
        "accelerate.utils.megatron_lm": """
            AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader
            MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep
            avg_losses_across_data_parallel_group gather_across_data_parallel_groups
            megatron_lm_initialize=initialize megatron_lm_prepare_data_loader=prepare_data_loader
            megatron_lm_prepare_model_optimizer_scheduler=prepare_model_optimizer_scheduler
            megatron_lm_prepare_optimizer=prepare_optimizer megatron_lm_prepare_scheduler=prepare_scheduler
        """,
        "accelerate.utils.memory": "*",
        "accelerate.utils.modeling": "*",
        "accelerate.utils.offload": "*",
        "accelerate.utils.operations": "*",
        "accelerate.utils.other": "*",
        "accelerate.utils.random": "*",
        "accelerate.utils.torch_xla": "*",
        "accelerate.utils.tqdm": "*",
        "accelerate.utils.transformer_engine": "*",
        "accelerate.utils.versions": "*",
    },
    "accelerate.utils.bnb": {
        "accel_bigmodel.quantize": """
            get_keys_to_not_convert get_quantized_model_device_map load_and_quantize_model
        """,
        "accelerate.legacy.quantised_layers": """
            get_parameter_device has_4bit_bnb_layers quantize_and_offload_8bit replace_with_bnb_layers
        """,
    },
    "accelerate.utils.ao": {
        "accel_plugins.precision.fp8": """
            convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers
            find_first_last_linear_layers has_ao_layers
        """,
    },
    "accelerate.utils.constants": {
        "accelerate.legacy.constants": """
            DTENSOR_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY
            FSDP_BACKWARD_PREFETCH FSDP_PYTORCH_VERSION FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE
            MITA_PROFILING_AVAILABLE_PYTORCH_VERSION PROFILE_PATTERN_NAME STR_OPERATION_TO_FUNC
            XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        """,
        "accel_bigmodel.casting": "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
        "accel_bigmodel.weight_files.names": """
            MODEL_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME
            WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
        """,
        "accel_plugins.checkpoint.files": """
            FSDP_MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        """,
        "accel_state.labels": "CUDA_DISTRIBUTED_TYPES TORCH_DISTRIBUTED_OPERATION_TYPES",
        "accel_state.mesh": """
            BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
            BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        """,
    },
    "accelerate.utils.dataclasses": {
        "accel_bigmodel.quantize": "BnbQuantizationConfig",
        "accel_data.config": "DataLoaderConfiguration",
        "accel_ops.tree": "TensorInformation",
        "accel_plugins.blocks": "get_module_class_from_name",
        "accel_plugins.checkpoint.config": "ProjectConfiguration",
        "accel_plugins.ddp.config": "DDPCommunicationHookType DistributedDataParallelKwargs",
        "accel_plugins.deepspeed.config": "DeepSpeedPlugin",
        "accel_plugins.fsdp.config": "FullyShardedDataParallelPlugin",
        "accel_megatron.config": """
            MODEL_CONFIGS_TO_MEGATRON_PARSERS MegatronLMPlugin add_model_config_to_megatron_parser parse_bert_config
            parse_glm4_moe_config parse_gpt2_config parse_llama_config parse_t5_config
        """,
        "accel_plugins.precision.config": """
            AORecipeKwargs AmaxComputeAlgorithm AutocastKwargs FP8BackendType FP8Format FP8RecipeKwargs
            GradScalerKwargs MSAMPRecipeKwargs OptLevel TERecipeKwargs
        """,
        "accel_plugins.transforms.config": "TorchDynamoPlugin TorchTensorParallelPlugin",
        "accel_state.choices": "ComputeEnvironment CustomDtype DynamoBackend SageMakerDistributedType",
        "accel_state.gradient": "GradientAccumulationPlugin",
        "accel_state.kwargs": "InitProcessGroupKwargs KwargsHandler",
        "accel_state.labels": "Backend BaseEnum DistributedType EnumWithContains PrecisionType RNGType",
        "accel_state.mesh": """
            DeepSpeedSequenceParallelConfig TorchContextParallelConfig TorchTensorParallelConfig
        """,
        "accel_torch.profile": "ProfileKwargs ProfilerActivity",
        "accel_tracking.registry": "LoggerType",
    },
    "accelerate.utils.deepspeed": {
        "accel_plugins.deepspeed.config": "DummyOptim DummyScheduler HfDeepSpeedConfig",
        "accel_plugins.deepspeed.engine": """
            DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper map_pytorch_optim_to_deepspeed
        """,
        "accelerate.legacy.deepspeed": "get_active_deepspeed_plugin",
    },
    "accelerate.utils.environment": {
        "accel_state.devices.torch_family": "check_cuda_p2p_ib_support get_driver_version get_gpu_info",
        "accelerate.legacy.availability": "check_cuda_fp8_capability get_current_device_type",
        "accelerate.legacy.environment": """
            CPUInformation are_libraries_initialized clear_environment convert_dict_to_env_variables
            get_cpu_distributed_information get_int_from_env override_numa_affinity parse_choice_from_env
            parse_flag_from_env patch_environment purge_accelerate_environment set_numa_affinity str_to_bool
        """,
    },
    "accelerate.utils.fsdp_utils": {
        "accel_plugins.fsdp.weights": "merge_fsdp_weights=merge_weights",
        "accelerate.legacy.fsdp": """
            disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac
            fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model
            fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler get_parameters_from_modules
        """,
        "accelerate.legacy.fsdp_checkpoints": """
            load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer
        """,
    },
    "accelerate.utils.imports": {
        "accel_bigmodel.trainable": "is_bitsandbytes_multi_backend_available=trains_on_cpu",
        "accelerate.legacy.availability": """
            USE_TORCH_XLA deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available
            is_amdsmi_available is_bf16_available is_bnb_available
            is_boto3_available is_clearml_available is_comet_ml_available is_cuda_available is_datasets_available
            is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1
            is_hpu_available is_import_timer_available is_lomo_available is_matplotlib_available
            is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available
            is_musa_available is_neuron_available is_npu_available is_numpy_available is_pandas_available
            is_peft_available is_pippy_available is_pynvml_available is_pytest_available is_rich_available
            is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available
            is_tensorboard_available is_timm_available is_torch_distributed_available is_torch_xla_available
            is_torchao_available is_torchdata_available is_torchdata_stateful_dataloader_available
            is_torchvision_available is_tqdm_available is_trackio_available is_transformer_engine_available
            is_transformer_engine_mxfp8_available is_transformers_available is_triton_available is_wandb_available
            is_weights_only_available is_xccl_available is_xpu_available torchao_required
        """,
    },
    "accelerate.utils.launch": {
        "accel_cli.launch.sagemaker": "_convert_nargs_to_dict=hyperparameters",
        "shutil": "which",
        "accelerate.legacy.launching": """
            PrepareForLaunch prepare_multi_gpu_env prepare_simple_launcher_cmd_env
        """,
    },
    "accelerate.utils.megatron_lm": {
        "accel_megatron.engine": "MegatronEngine",
        "accel_megatron.parallel": """
            avg_losses_across_data_parallel_group gather_across_data_parallel_groups
        """,
        "accel_megatron.objects": """
            MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper
            MegatronLMSchedulerWrapper
        """,
        "accel_megatron.train_steps": "AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep",
        "accel_megatron.stepwise": """
            finish_mpu_init initialize model_provider_func prepare_data_loader=prepare_megatron_loader
            prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler
        """,
    },
    "accelerate.utils.memory": {
        "accel_ops.batch_size": "find_executable_batch_size",
        "accel_state.memory": "clear_device_cache release_memory should_reduce_batch_size",
    },
    "accelerate.utils.modeling": {
        "accel_bigmodel.align": "align_module_device has_offloaded_params",
        "accel_bigmodel.placement": "get_balanced_memory get_max_memory infer_auto_device_map",
        "accel_bigmodel.device_map": "check_device_map check_device_same clean_device_map",
        "accel_bigmodel.dispatch": "get_state_dict_offloaded_model",
        "accel_bigmodel.load": "load_checkpoint_in_model",
        "accel_bigmodel.sizes": """
            compute_module_sizes convert_file_size_to_int dtype_byte_size get_max_layer_size
        """,
        "accel_bigmodel.tensors": """
            find_tied_parameters get_non_persistent_buffers id_tensor_storage named_module_tensors retie_parameters
        """,
        "accelerate.legacy.big_models": """
            calculate_maximum_sizes check_tied_parameters_in_config check_tied_parameters_on_same_device
            compute_module_total_buffer_size fallback_allocate get_module_leaves get_module_size_with_ties
            get_state_dict_from_offload load_offloaded_weights load_state_dict
        """,
        "accelerate.legacy.error_texts": "set_module_tensor_to_device",
        "accelerate.legacy.precision": "get_grad_scaler get_mixed_precision_context_manager",
        "accelerate.legacy.weights": "is_peft_model",
    },
    "accelerate.utils.offload": {
        "accel_bigmodel.offload": """
            OffloadedWeightsLoader PrefixedDataset load_offloaded_weight offload_state_dict offload_weight
            save_offload_index
        """,
        "accelerate.legacy.big_models": "extract_submodules_state_dict",
    },
    "accelerate.utils.operations": {
        "accelerate.legacy.deepspeed": "GatheredParameters",
        "accel_ops.collectives": "gather",
        "accel_ops.conversion": """
            ConvertOutputsToFp32 convert_outputs_to_fp32 convert_to_fp32 send_to_device
        """,
        "accel_ops.objects": "gather_object",
        "accel_ops.shape": """
            CannotPadNestedTensorWarning concatenate pad_across_processes pad_input_tensors slice_tensors
        """,
        "accel_ops.tree": """
            find_batch_size find_device get_data_structure get_shape honor_type initialize_tensors is_namedtuple
            is_tensor_information is_torch_tensor listify
        """,
        "accelerate.legacy.operations": """
            DistributedOperationException broadcast broadcast_object_list copy_tensor_to_devices
            ignorant_find_batch_size is_torch_xpu_tensor reduce
        """,
        "accelerate.legacy.error_texts": "recursively_apply",
    },
    "accelerate.utils.other": {
        "accel_plugins.blocks": "has_repeated_blocks is_repeated_blocks",
        "accel_plugins.checkpoint.pickled": "load save",
        "accel_plugins.transforms.compile": """
            compile_regions compile_regions_deepspeed=compile_regions_in_place
            compile_regions_fsdp2=compile_regions_in_place has_compiled_regions
        """,
        "accel_plugins.layers": "extract_model_from_parallel is_compiled_module",
        "accel_bigmodel.sizes": "convert_bytes",
        "accelerate.legacy.environment": "check_os_kernel",
        "accel_state.network": "get_free_port is_port_in_use",
        "accelerate.legacy.objects": "get_pretty_name merge_dicts recursive_getattr",
        "accel_state.process": "wait_for_everyone",
        "accelerate.legacy.weights": """
            clean_state_dict_for_safetensors get_model_tp_size get_module_children_bottom_up model_has_dtensor
        """,
    },
    "accelerate.utils.random": {"accel_ops.rng": "set_seed synchronize_rng_state synchronize_rng_states"},
    "accelerate.utils.torch_xla": {"accelerate.legacy.install_xla": "install_xla"},
    "accelerate.utils.tqdm": {"accel_state.console": "tqdm"},
    "accelerate.utils.transformer_engine": {
        "accel_plugins.precision.fp8": """
            apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers
        """,
    },
    "accelerate.utils.versions": {"accelerate.legacy.versions": "compare_versions is_torch_version torch_version"},
}
"""Old module -> source -> names; `old=ours` when the two names differ.

A source is a module of this project or, to avoid repetition, another old module; `*` stands for all its names.
"""
