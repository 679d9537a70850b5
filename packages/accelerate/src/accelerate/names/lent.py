"""Names that scripts import from an old module which does not define them but imports them for its own use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ("BORROWED", "LIBRARIES")

_SAME_NAME: Final = """
    argparse base64 collections contextlib copy enum functools gc importlib inspect json logging math os pickle platform
    random re shutil socket subprocess sys tempfile threading time torch warnings weakref yaml
"""

LIBRARIES: Final[Mapping[str, str]] = {
    **dict(zip(_SAME_NAME.split(), _SAME_NAME.split(), strict=True)),
    "F": "torch.nn.functional",
    "dist": "torch.distributed",
    "nn": "torch.nn",
    "np": "numpy",
    "optim": "torch.optim",
}
"""Modules that scripts read from an old module, which imports them for its own use: name -> module."""

BORROWED: Final[Mapping[str, Mapping[str, str]]] = {
    "accelerate.accelerator": {
        "accelerate.data_loader": "DataLoaderDispatcher prepare_data_loader skip_first_batches",
        "accelerate.logging": "get_logger",
        "accelerate.checkpointing": """
            load_accelerator_state load_custom_state save_accelerator_state save_custom_state
        """,
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.state": "AcceleratorState GradientState PartialState",
        "accelerate.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers",
        "accelerate.utils": """
            AORecipeKwargs AutocastKwargs DTENSOR_PYTORCH_VERSION DataLoaderConfiguration DeepSpeedPlugin
            DistributedDataParallelKwargs DistributedType DynamoBackend FP8RecipeKwargs FSDP2_PYTORCH_VERSION
            FSDP_PYTORCH_VERSION FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs KwargsHandler LoggerType MODEL_NAME MSAMPRecipeKwargs MegatronLMPlugin
            PROFILE_PATTERN_NAME PrecisionType ProfileKwargs ProjectConfiguration RNGType SAFE_WEIGHTS_INDEX_NAME
            SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME TERecipeKwargs TorchDynamoPlugin
            TorchTensorParallelPlugin WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME apply_fp8_autowrap
            check_os_kernel clean_state_dict_for_safetensors compare_versions compile_regions compile_regions_deepspeed
            compile_regions_fsdp2 convert_model convert_model_to_fp8_ao convert_outputs_to_fp32 ensure_weights_retied
            extract_model_from_parallel fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_prepare_model
            fsdp2_switch_optimizer_parameters gather gather_object get_fsdp2_grad_scaler get_grad_scaler
            get_mixed_precision_context_manager get_pretty_name get_state_dict_offloaded_model has_offloaded_params
            is_bf16_available is_bitsandbytes_multi_backend_available is_compiled_module is_deepspeed_available
            is_lomo_available is_megatron_lm_available is_mlu_available is_msamp_available is_musa_available
            is_npu_available is_torch_version is_torch_xla_available is_torchao_available
            is_transformer_engine_available is_xpu_available load_fsdp_model load_fsdp_optimizer model_has_dtensor
            pad_across_processes parse_choice_from_env recursively_apply reduce release_memory save save_fsdp_model
            save_fsdp_optimizer wait_for_everyone
        """,
        "accelerate.utils.dataclasses": "FP8BackendType",
        "accelerate.utils.other": "get_model_tp_size",
    },
    "accelerate.big_modeling": {
        "accelerate.hooks": """
            AlignDevicesHook CpuOffload LayerwiseCastingHook UserCpuOffloadHook add_hook_to_module
            attach_align_device_hook attach_align_device_hook_on_blocks
        """,
        "accelerate.utils": """
            OffloadedWeightsLoader SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING check_cuda_p2p_ib_support check_device_map
            extract_submodules_state_dict find_tied_parameters get_balanced_memory infer_auto_device_map
            is_bnb_available is_mlu_available is_musa_available is_neuron_available is_npu_available is_sdaa_available
            is_xpu_available load_checkpoint_in_model offload_state_dict parse_flag_from_env recursive_getattr
            retie_parameters
        """,
    },
    "accelerate.data_loader": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "GradientState PartialState",
        "accelerate.utils": """
            DistributedType RNGType broadcast broadcast_object_list compare_versions concatenate find_batch_size
            get_data_structure initialize_tensors is_datasets_available is_torch_version is_torch_xla_available
            is_torchdata_stateful_dataloader_available send_to_device slice_tensors synchronize_rng_states
        """,
    },
    "accelerate.hooks": {
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            PrefixedDataset clear_device_cache find_device get_non_persistent_buffers is_mlu_available
            is_musa_available is_npu_available named_module_tensors recursive_getattr send_to_device
            set_module_tensor_to_device
        """,
    },
    "accelerate.inference": {
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            calculate_maximum_sizes convert_bytes copy_tensor_to_devices ignorant_find_batch_size infer_auto_device_map
            is_pippy_available pad_input_tensors send_to_device
        """,
    },
    "accelerate.logging": {
        "accelerate.state": "PartialState",
    },
    "accelerate.memory_utils": {
        "accelerate.utils": "find_executable_batch_size",
    },
    "accelerate.optimizer": {
        "accelerate.state": "AcceleratorState GradientState",
        "accelerate.utils": "DistributedType honor_type is_lomo_available is_torch_xla_available",
    },
    "accelerate.parallelism_config": {
        "accelerate.utils": """
            DeepSpeedSequenceParallelConfig DistributedType TorchContextParallelConfig TorchTensorParallelConfig
            is_torch_version
        """,
    },
    "accelerate.scheduler": {
        "accelerate.state": "AcceleratorState GradientState",
    },
    "accelerate.state": {
        "accelerate.utils": """
            DistributedType DynamoBackend GradientAccumulationPlugin SageMakerDistributedType
            check_cuda_fp8_capability check_cuda_p2p_ib_support get_cpu_distributed_information get_int_from_env
            is_datasets_available is_deepspeed_available is_fp8_available is_habana_gaudi1 is_hpu_available
            is_mlu_available is_mps_available is_musa_available is_neuron_available is_npu_available is_sdaa_available
            is_torch_xla_available is_xccl_available is_xpu_available parse_choice_from_env parse_flag_from_env
            set_numa_affinity
        """,
    },
    "accelerate.tracking": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            LoggerType compare_versions is_aim_available is_clearml_available is_comet_ml_available
            is_dvclive_available is_mlflow_available is_swanlab_available is_tensorboard_available
            is_trackio_available is_wandb_available listify str_to_bool
        """,
    },
    "accelerate.utils.bnb": {
        "accelerate.utils": """
            BnbQuantizationConfig find_tied_parameters get_balanced_memory infer_auto_device_map is_4bit_bnb_available
            is_8bit_bnb_available load_checkpoint_in_model offload_weight set_module_tensor_to_device
        """,
        "accelerate.big_modeling": "dispatch_model init_empty_weights",
    },
    "accelerate.utils.dataclasses": {
        "accelerate.utils": """
            BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
            compare_versions is_cuda_available is_hpu_available is_mlu_available is_msamp_available is_musa_available
            is_neuron_available is_npu_available is_rocm_available is_torch_version is_torchao_available
            is_transformer_engine_available is_xpu_available parse_flag_from_env str_to_bool
        """,
    },
    "accelerate.utils.fsdp_utils": {
        "accelerate.logging": "get_logger",
        "accelerate.utils": "get_non_persistent_buffers is_torch_version save",
        "accelerate.utils.constants": "FSDP_MODEL_NAME OPTIMIZER_NAME SAFE_WEIGHTS_NAME WEIGHTS_NAME",
        "accelerate.utils.dataclasses": "get_module_class_from_name",
        "accelerate.utils.modeling": "is_peft_model",
        "accelerate.utils.other": "get_module_children_bottom_up is_compiled_module",
    },
    "accelerate.utils.imports": {
        "accelerate.utils": "compare_versions is_torch_version parse_flag_from_env patch_environment str_to_bool",
    },
    "accelerate.utils.launch": {"accel_cli.launch.mpi": "subprocess", "shutil": "which"},
    "accelerate.utils.memory": {
        "accelerate.utils": """
            is_cuda_available is_hpu_available is_mlu_available is_mps_available is_musa_available is_neuron_available
            is_npu_available is_sdaa_available is_xpu_available
        """,
    },
    "accelerate.utils.modeling": {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils": """
            AutocastKwargs CustomDtype DistributedType SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME
            clear_device_cache is_hpu_available is_mlu_available is_mps_available is_musa_available is_npu_available
            is_peft_available is_sdaa_available is_torch_version is_torch_xla_available is_tqdm_available
            is_xpu_available load_offloaded_weight offload_weight save_offload_index tqdm
        """,
    },
    "accelerate.utils.operations": {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils": """
            DistributedType TORCH_DISTRIBUTED_OPERATION_TYPES TensorInformation is_npu_available
            is_torch_distributed_available is_torch_version is_torch_xla_available
        """,
    },
    "accelerate.utils.other": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            DistributedType id_tensor_storage is_deepspeed_available is_numpy_available is_torch_distributed_available
            is_torch_version is_torch_xla_available is_weights_only_available
        """,
    },
    "accelerate.utils.random": {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils": """
            CUDA_DISTRIBUTED_TYPES DistributedType RNGType is_hpu_available is_mlu_available is_musa_available
            is_neuron_available is_npu_available is_sdaa_available is_torch_xla_available is_xpu_available
        """,
    },
    "accelerate.utils.tqdm": {
        "accelerate.state": "PartialState",
        "accelerate.utils": "is_tqdm_available",
    },
}
"""Names that scripts import from an old module although another old module defines them."""
