"""What is found at the old address `accelerate.utils.bnb`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.budget import get_balanced_memory as get_balanced_memory
    from accel_bigmodel.device_map import infer_auto_device_map as infer_auto_device_map
    from accel_bigmodel.dispatch import dispatch_model as dispatch_model
    from accel_bigmodel.load import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_bigmodel.meta import init_empty_weights as init_empty_weights
    from accel_bigmodel.offload import offload_weight as offload_weight
    from accel_bigmodel.place import set_module_tensor_to_device as set_module_tensor_to_device
    from accel_bigmodel.quantize import (
        get_keys_to_not_convert,
        get_parameter_device,
        has_4bit_bnb_layers,
        quantize_and_offload_8bit,
        replace_with_bnb_layers,
    )
    from accel_bigmodel.quantize_config import BnbQuantizationConfig as BnbQuantizationConfig
    from accel_bigmodel.quantize_load import get_quantized_model_device_map, load_and_quantize_model
    from accel_bigmodel.tied import find_tied_parameters as find_tied_parameters
    from accel_state.availability import is_4bit_bnb_available as is_4bit_bnb_available
    from accel_state.availability import is_8bit_bnb_available as is_8bit_bnb_available

__all__ = (
    "get_keys_to_not_convert",
    "get_parameter_device",
    "get_quantized_model_device_map",
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
    "quantize_and_offload_8bit",
    "replace_with_bnb_layers",
)

serve(__name__)
