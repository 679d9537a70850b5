"""What is found at the old address `accelerate.hooks`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.align import AlignDevicesHook
    from accel_bigmodel.attach import (
        attach_align_device_hook,
        attach_align_device_hook_on_blocks,
        attach_execution_device_hook,
    )
    from accel_bigmodel.casting import LayerwiseCastingHook
    from accel_bigmodel.cpu_hooks import CpuOffload, UserCpuOffloadHook
    from accel_bigmodel.hooks import (
        ModelHook,
        SequentialHook,
        add_hook_to_module,
        remove_hook_from_module,
        remove_hook_from_submodules,
    )
    from accel_bigmodel.offload import PrefixedDataset as PrefixedDataset
    from accel_bigmodel.place import set_module_tensor_to_device as set_module_tensor_to_device
    from accel_bigmodel.sizes import get_non_persistent_buffers as get_non_persistent_buffers
    from accel_bigmodel.sizes import named_module_tensors as named_module_tensors
    from accel_ops.measure import find_device as find_device
    from accel_ops.move import send_to_device as send_to_device
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.memory import clear_device_cache as clear_device_cache
    from accel_state.objects import recursive_getattr as recursive_getattr
    from accel_state.process import PartialState as PartialState

__all__ = (
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
)

serve(__name__)
