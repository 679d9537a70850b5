"""Names that scripts import from an old module that only imported them for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ("BORROWED",)

BORROWED: Final[Mapping[str, Mapping[str, str]]] = {
    "accelerate.big_modeling": {
        "accelerate.hooks": """
            AlignDevicesHook CpuOffload LayerwiseCastingHook UserCpuOffloadHook add_hook_to_module
            attach_align_device_hook attach_align_device_hook_on_blocks
        """,
        "accelerate.utils": """
            OffloadedWeightsLoader SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING check_device_map extract_submodules_state_dict
            find_tied_parameters get_balanced_memory infer_auto_device_map load_checkpoint_in_model offload_state_dict
            retie_parameters
        """,
    },
    "accelerate.accelerator": {
        "accelerate.data_loader": "DataLoaderDispatcher prepare_data_loader skip_first_batches",
        "accelerate.logging": "get_logger",
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.state": "AcceleratorState GradientState PartialState",
        "accelerate.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers",
        "accelerate.utils": """
            AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs DistributedType
            DynamoBackend FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs KwargsHandler LoggerType MODEL_NAME ParallelismConfig PrecisionType
            ProjectConfiguration RNGType SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME
            SCALER_NAME TorchDynamoPlugin WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
            compile_regions extract_model_from_parallel gather gather_object get_state_dict_offloaded_model
            has_offloaded_params is_compiled_module is_torch_version pad_across_processes recursively_apply
            reduce wait_for_everyone
        """,
    },
    "accelerate.data_loader": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "GradientState PartialState",
        "accelerate.utils": """
            DistributedType RNGType broadcast broadcast_object_list concatenate find_batch_size get_data_structure
            initialize_tensors is_torch_version send_to_device slice_tensors synchronize_rng_states
        """,
    },
    "accelerate.hooks": {
        "accelerate.state": "PartialState",
        "accelerate.utils": """
            PrefixedDataset find_device get_non_persistent_buffers named_module_tensors send_to_device
            set_module_tensor_to_device
        """,
    },
    "accelerate.logging": {"accelerate.state": "PartialState"},
    "accelerate.optimizer": {
        "accelerate.state": "AcceleratorState GradientState",
        "accelerate.utils": "DistributedType honor_type",
    },
    "accelerate.parallelism_config": {
        "accelerate.utils.dataclasses": """
            DeepSpeedSequenceParallelConfig DistributedType TorchContextParallelConfig TorchTensorParallelConfig
        """,
        "accelerate.utils.versions": "is_torch_version",
    },
    "accelerate.scheduler": {"accelerate.state": "AcceleratorState GradientState"},
    "accelerate.state": {
        "accelerate.utils": "DistributedType DynamoBackend GradientAccumulationPlugin SageMakerDistributedType",
    },
    "accelerate.tracking": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils": "LoggerType listify",
    },
    "accelerate.utils.modeling": {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils.constants": "SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME",
        "accelerate.utils.dataclasses": "AutocastKwargs CustomDtype DistributedType",
        "accelerate.utils.offload": "load_offloaded_weight offload_weight save_offload_index",
        "accelerate.utils.tqdm": "tqdm",
        "accelerate.utils.versions": "is_torch_version",
    },
    "accelerate.utils.operations": {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils.dataclasses": "DistributedType TensorInformation",
        "accelerate.utils.versions": "is_torch_version",
    },
    "accelerate.utils.other": {
        "accelerate.state": "PartialState",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.modeling": "id_tensor_storage",
        "accelerate.utils.versions": "is_torch_version",
    },
}
"""Names that an old module merely imports, and scripts import from there although their home is another one."""
