"""The table of the drop-in: which names each old module has, and which of our modules each comes from.

`tools/gen_alias.py` writes the modules from it, and `accelerate.address` serves their names by it while a program runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

__all__ = (
    "BORROWED",
    "HAND_WRITTEN",
    "LOGGERS",
    "NAMES",
    "NOT_PROVIDED",
    "REMOVED",
    "VERSION",
    "Owner",
    "borrowed",
    "owners",
    "served",
)

VERSION: Final = "1.15.0+accel.1"
"""Version of the surface that is imitated; clients compare the version of the distribution."""

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

BORROWED: Final[Mapping[str, Mapping[str, str]]] = {
    "accelerate.big_modeling": {
        "accelerate.utils": """
            check_device_map find_tied_parameters get_balanced_memory infer_auto_device_map retie_parameters
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
            AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs DistributedType DynamoBackend
            GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType MODEL_NAME
            PrecisionType ProjectConfiguration RNGType SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME
            SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
            extract_model_from_parallel gather gather_object is_compiled_module is_torch_version
            pad_across_processes recursively_apply reduce wait_for_everyone
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
    "accelerate.logging": {"accelerate.state": "PartialState"},
    "accelerate.optimizer": {
        "accelerate.state": "AcceleratorState GradientState",
        "accelerate.utils": "DistributedType honor_type",
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

HAND_WRITTEN: Final = ("address", "installation", "legacy", "loggers", "names")
"""Modules of this package that are not written by the generator."""

LOGGERS: Final = {
    "accel_bigmodel": "accelerate.big_modeling",
    "accel_cli": "accelerate.commands",
    "accel_data": "accelerate.data_loader",
    "accel_ops": "accelerate.utils.operations",
    "accel_plugins": "accelerate.utils",
    "accel_state": "accelerate.state",
    "accel_torch": "accelerate.accelerator",
    "accel_tracking": "accelerate.tracking",
}
"""The old logger that hears of what a package of ours logs outside of the modules of the table."""

NOT_PROVIDED: Final[Mapping[str, tuple[str, str]]] = {
    "accelerate.deepspeed_utils": ("It was removed before 1.0.", "Import from accelerate.utils."),
    "accelerate.kwargs_handlers": ("It was removed before 1.0.", "Import from accelerate.utils."),
    "accelerate.test_utils": (
        "The test helpers of the original library are not part of the drop-in.",
        "Use accel_state.testing (real processes, clean state) and accel_plugins.testing (suites for backends).",
    ),
}
"""Modules that cannot be had: what stands in the way, and what to do."""

REMOVED: Final[Mapping[str, str]] = {
    "get_launch_prefix": "Call `accel launch`; on several machines it starts torch.distributed.run.",
    "is_ccl_available": "torch has no need of oneCCL's bindings on CPU any more; gloo is the backend there.",
    "is_ipex_available": "Its optimisations are part of torch; leave the call out.",
    "is_safetensors_available": "safetensors is always installed; leave the call out.",
    "is_tpu_available": "Use is_torch_xla_available(check_is_tpu=True).",
    "shard_checkpoint": "Use accel_bigmodel.split_state_dict, or huggingface_hub.split_torch_state_dict_into_shards.",
}
"""Names that were removed before 1.15, and what replaces each."""


class Owner(NamedTuple):
    """Where a name really lives.

    Args:
        module: one of our modules; what is assigned at the old address is set there.
        name: what it is called there.
    """

    module: str
    name: str


@cache
def owners(address: str) -> Mapping[str, Owner]:
    """The names of an old module that are its own, each with its owner."""
    return dict(_resolved(NAMES[address]))


@cache
def borrowed(address: str) -> Mapping[str, Owner]:
    """The names that an old module has from its neighbours."""
    own = owners(address)
    return {name: owner for name, owner in _resolved(BORROWED.get(address, {})) if name not in own}


def served(address: str) -> Mapping[str, Owner]:
    """All names that can be imported from an old module."""
    return {**owners(address), **borrowed(address)}


def _resolved(sources: Mapping[str, str]) -> Iterator[tuple[str, Owner]]:
    for source, words in sources.items():
        known = owners(source) if source in NAMES else None
        for word in known if known is not None and words == "*" else words.split():
            old, _, ours = word.partition("=")
            yield old, Owner(source, ours or old) if known is None else known[ours or old]
