"""Models larger than memory: weight files, device maps, offload and meta initialisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.settings.lazy import lazy_names

if TYPE_CHECKING:
    from accel_bigmodel.budget import (
        get_balanced_memory,
        get_max_memory,
    )
    from accel_bigmodel.byte_counts import (
        convert_bytes,
        convert_file_size_to_int,
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
    from accel_bigmodel.meta import (
        init_empty_weights,
        init_on_device,
    )
    from accel_bigmodel.place import (
        set_module_tensor_to_device,
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
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "DeviceMapReport",
    "WeightShards",
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
    "dtype_byte_size",
    "explain_device_map",
    "find_tied_parameters",
    "find_weights",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_non_persistent_buffers",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_weights",
    "load_weights_file",
    "named_module_tensors",
    "retie_parameters",
    "save_weights",
    "save_weights_file",
    "set_module_tensor_to_device",
    "split_state_dict",
    "tied_names",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_bigmodel.budget": (
            "get_balanced_memory",
            "get_max_memory",
        ),
        "accel_bigmodel.byte_counts": (
            "convert_bytes",
            "convert_file_size_to_int",
        ),
        "accel_bigmodel.device_map": (
            "check_device_map",
            "check_device_same",
            "clean_device_map",
            "explain_device_map",
            "infer_auto_device_map",
        ),
        "accel_bigmodel.device_map_report": ("DeviceMapReport",),
        "accel_bigmodel.meta": (
            "init_empty_weights",
            "init_on_device",
        ),
        "accel_bigmodel.place": ("set_module_tensor_to_device",),
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
