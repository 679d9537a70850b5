"""What is found at the old address `accelerate.big_modeling`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.align import AlignDevicesHook as AlignDevicesHook
    from accel_bigmodel.attach import attach_align_device_hook as attach_align_device_hook
    from accel_bigmodel.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
    from accel_bigmodel.budget import get_balanced_memory as get_balanced_memory
    from accel_bigmodel.casting import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    from accel_bigmodel.casting import LayerwiseCastingHook as LayerwiseCastingHook
    from accel_bigmodel.casting import attach_layerwise_casting_hooks
    from accel_bigmodel.cpu_hooks import CpuOffload as CpuOffload
    from accel_bigmodel.cpu_hooks import UserCpuOffloadHook as UserCpuOffloadHook
    from accel_bigmodel.cpu_hooks import cpu_offload_with_hook
    from accel_bigmodel.device_map import check_device_map as check_device_map
    from accel_bigmodel.device_map import infer_auto_device_map as infer_auto_device_map
    from accel_bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model
    from accel_bigmodel.hooks import add_hook_to_module as add_hook_to_module
    from accel_bigmodel.load import load_checkpoint_and_dispatch
    from accel_bigmodel.load import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_bigmodel.meta import init_empty_weights, init_on_device
    from accel_bigmodel.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
    from accel_bigmodel.offload import extract_submodules_state_dict as extract_submodules_state_dict
    from accel_bigmodel.offload import offload_state_dict as offload_state_dict
    from accel_bigmodel.tied import find_tied_parameters as find_tied_parameters
    from accel_bigmodel.tied import retie_parameters as retie_parameters
    from accel_state.availability import is_bnb_available as is_bnb_available
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_neuron_available as is_neuron_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_sdaa_available as is_sdaa_available
    from accel_state.availability import is_xpu_available as is_xpu_available
    from accel_state.devices.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from accel_state.environment import parse_flag_from_env as parse_flag_from_env
    from accel_state.objects import recursive_getattr as recursive_getattr

__all__ = (
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
)

serve(__name__)
