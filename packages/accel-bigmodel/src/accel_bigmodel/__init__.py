"""Models larger than memory: weight files, device maps, offload and meta initialisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_bigmodel.align import (
        AlignDevicesHook,
        align_module_device,
        has_offloaded_params,
    )
    from accel_bigmodel.attach import (
        attach_align_device_hook,
        attach_align_device_hook_on_blocks,
        attach_execution_device_hook,
    )
    from accel_bigmodel.budget import (
        get_balanced_memory,
        get_max_memory,
    )
    from accel_bigmodel.byte_counts import (
        convert_bytes,
        convert_file_size_to_int,
    )
    from accel_bigmodel.casting import (
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
        LayerwiseCastingHook,
        attach_layerwise_casting_hooks,
    )
    from accel_bigmodel.cpu_hooks import (
        CpuOffload,
        UserCpuOffloadHook,
        cpu_offload_with_hook,
    )
    from accel_bigmodel.device_map import (
        check_device_map,
        check_device_same,
        clean_device_map,
        explain_device_map,
        infer_auto_device_map,
    )
    from accel_bigmodel.device_map_report import (
        DeviceMapReport,
    )
    from accel_bigmodel.dispatch import (
        cpu_offload,
        disk_offload,
        dispatch_model,
    )
    from accel_bigmodel.estimate import (
        Estimate,
        estimate_memory,
    )
    from accel_bigmodel.export import (
        get_state_dict_from_offload,
        get_state_dict_offloaded_model,
    )
    from accel_bigmodel.fallback import (
        fallback_allocate,
        get_module_size_with_ties,
    )
    from accel_bigmodel.hooks import (
        ModelHook,
        SequentialHook,
        add_hook_to_module,
        remove_hook_from_module,
        remove_hook_from_submodules,
    )
    from accel_bigmodel.load import (
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
        load_offloaded_weights,
        load_state_dict,
    )
    from accel_bigmodel.load_names import (
        LoadReport,
    )
    from accel_bigmodel.meta import (
        init_empty_weights,
        init_on_device,
    )
    from accel_bigmodel.offload import (
        OffloadedWeightsLoader,
        PrefixedDataset,
        extract_submodules_state_dict,
        load_offloaded_weight,
        offload_state_dict,
        offload_weight,
    )
    from accel_bigmodel.offload_index import (
        save_offload_index,
    )
    from accel_bigmodel.pipeline import (
        prepare_pippy,
    )
    from accel_bigmodel.place import (
        set_module_tensor_to_device,
    )
    from accel_bigmodel.quantize import (
        get_keys_to_not_convert,
        has_4bit_bnb_layers,
        quantize_and_offload_8bit,
        replace_with_bnb_layers,
    )
    from accel_bigmodel.quantize_config import (
        BnbQuantizationConfig,
    )
    from accel_bigmodel.quantize_load import (
        get_quantized_model_device_map,
        load_and_quantize_model,
    )
    from accel_bigmodel.sizes import (
        calculate_maximum_sizes,
        compute_module_sizes,
        compute_module_total_buffer_size,
        dtype_byte_size,
        get_max_layer_size,
        get_module_leaves,
        get_non_persistent_buffers,
        named_module_tensors,
    )
    from accel_bigmodel.tied import (
        check_tied_parameters_in_config,
        check_tied_parameters_on_same_device,
        find_tied_parameters,
        id_tensor_storage,
        retie_parameters,
        tied_names,
    )
    from accel_bigmodel.weight_files import (
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
        WeightShards,
        find_weights,
        load_weights,
        load_weights_file,
        save_weights,
        save_weights_file,
        split_state_dict,
    )

__all__ = (
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "AlignDevicesHook",
    "BnbQuantizationConfig",
    "CpuOffload",
    "DeviceMapReport",
    "Estimate",
    "LayerwiseCastingHook",
    "LoadReport",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "WeightShards",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_bytes",
    "convert_file_size_to_int",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "estimate_memory",
    "explain_device_map",
    "extract_submodules_state_dict",
    "fallback_allocate",
    "find_tied_parameters",
    "find_weights",
    "get_balanced_memory",
    "get_keys_to_not_convert",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_quantized_model_device_map",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_4bit_bnb_layers",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "load_weights",
    "load_weights_file",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "prepare_pippy",
    "quantize_and_offload_8bit",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "replace_with_bnb_layers",
    "retie_parameters",
    "save_offload_index",
    "save_weights",
    "save_weights_file",
    "set_module_tensor_to_device",
    "split_state_dict",
    "tied_names",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_bigmodel.align": (
            "AlignDevicesHook",
            "align_module_device",
            "has_offloaded_params",
        ),
        "accel_bigmodel.attach": (
            "attach_align_device_hook",
            "attach_align_device_hook_on_blocks",
            "attach_execution_device_hook",
        ),
        "accel_bigmodel.budget": (
            "get_balanced_memory",
            "get_max_memory",
        ),
        "accel_bigmodel.byte_counts": (
            "convert_bytes",
            "convert_file_size_to_int",
        ),
        "accel_bigmodel.casting": (
            "LayerwiseCastingHook",
            "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
            "attach_layerwise_casting_hooks",
        ),
        "accel_bigmodel.cpu_hooks": (
            "CpuOffload",
            "UserCpuOffloadHook",
            "cpu_offload_with_hook",
        ),
        "accel_bigmodel.device_map": (
            "check_device_map",
            "check_device_same",
            "clean_device_map",
            "explain_device_map",
            "infer_auto_device_map",
        ),
        "accel_bigmodel.device_map_report": ("DeviceMapReport",),
        "accel_bigmodel.dispatch": (
            "cpu_offload",
            "disk_offload",
            "dispatch_model",
        ),
        "accel_bigmodel.estimate": (
            "Estimate",
            "estimate_memory",
        ),
        "accel_bigmodel.export": (
            "get_state_dict_from_offload",
            "get_state_dict_offloaded_model",
        ),
        "accel_bigmodel.fallback": (
            "fallback_allocate",
            "get_module_size_with_ties",
        ),
        "accel_bigmodel.hooks": (
            "ModelHook",
            "SequentialHook",
            "add_hook_to_module",
            "remove_hook_from_module",
            "remove_hook_from_submodules",
        ),
        "accel_bigmodel.load": (
            "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model",
            "load_offloaded_weights",
            "load_state_dict",
        ),
        "accel_bigmodel.load_names": ("LoadReport",),
        "accel_bigmodel.meta": (
            "init_empty_weights",
            "init_on_device",
        ),
        "accel_bigmodel.offload": (
            "OffloadedWeightsLoader",
            "PrefixedDataset",
            "extract_submodules_state_dict",
            "load_offloaded_weight",
            "offload_state_dict",
            "offload_weight",
        ),
        "accel_bigmodel.offload_index": ("save_offload_index",),
        "accel_bigmodel.pipeline": ("prepare_pippy",),
        "accel_bigmodel.place": ("set_module_tensor_to_device",),
        "accel_bigmodel.quantize": (
            "get_keys_to_not_convert",
            "has_4bit_bnb_layers",
            "quantize_and_offload_8bit",
            "replace_with_bnb_layers",
        ),
        "accel_bigmodel.quantize_config": ("BnbQuantizationConfig",),
        "accel_bigmodel.quantize_load": (
            "get_quantized_model_device_map",
            "load_and_quantize_model",
        ),
        "accel_bigmodel.sizes": (
            "calculate_maximum_sizes",
            "compute_module_sizes",
            "compute_module_total_buffer_size",
            "dtype_byte_size",
            "get_max_layer_size",
            "get_module_leaves",
            "get_non_persistent_buffers",
            "named_module_tensors",
        ),
        "accel_bigmodel.tied": (
            "check_tied_parameters_in_config",
            "check_tied_parameters_on_same_device",
            "find_tied_parameters",
            "id_tensor_storage",
            "retie_parameters",
            "tied_names",
        ),
        "accel_bigmodel.weight_files": (
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
            "WeightShards",
            "find_weights",
            "load_weights",
            "load_weights_file",
            "save_weights",
            "save_weights_file",
            "split_state_dict",
        ),
    },
)
