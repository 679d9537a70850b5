"""What is found at the old address `accelerate.utils.other`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.byte_counts import convert_bytes
    from accel_bigmodel.tied import id_tensor_storage as id_tensor_storage
    from accel_plugins.blocks import has_repeated_blocks, is_repeated_blocks
    from accel_plugins.checkpoint.objects import load, save
    from accel_plugins.transforms.compile import compile_regions, has_compiled_regions
    from accel_plugins.transforms.compile import compile_regions_in_place as compile_regions_deepspeed
    from accel_plugins.transforms.compile import compile_regions_in_place as compile_regions_fsdp2
    from accel_plugins.wrapped.unwrap import extract_model_from_parallel, is_compiled_module
    from accel_state.availability import is_deepspeed_available as is_deepspeed_available
    from accel_state.availability import is_numpy_available as is_numpy_available
    from accel_state.availability import is_torch_distributed_available as is_torch_distributed_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.availability import is_weights_only_available as is_weights_only_available
    from accel_state.environment import check_os_kernel
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.logging import get_logger as get_logger
    from accel_state.network import get_free_port, is_port_in_use
    from accel_state.objects import get_pretty_name, merge_dicts, recursive_getattr
    from accel_state.process import PartialState as PartialState
    from accel_state.process import wait_for_everyone
    from accel_state.settings.versions import is_torch_version as is_torch_version
    from accelerate.legacy.weights import (
        TORCH_SAFE_GLOBALS,
        clean_state_dict_for_safetensors,
        get_model_tp_size,
        get_module_children_bottom_up,
        model_has_dtensor,
    )

__all__ = (
    "TORCH_SAFE_GLOBALS",
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_port_in_use",
    "is_repeated_blocks",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
)

serve(__name__)
