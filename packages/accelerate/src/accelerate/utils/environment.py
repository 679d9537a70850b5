"""What is found at the old address `accelerate.utils.environment`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.affinity import override_numa_affinity, set_numa_affinity
    from accel_state.devices.cuda import check_cuda_fp8_capability
    from accel_state.devices.nvidia import check_cuda_p2p_ib_support, get_driver_version, get_gpu_info
    from accel_state.devices.select import get_current_device_type
    from accel_state.environment import (
        CPUInformation,
        are_libraries_initialized,
        clear_environment,
        convert_dict_to_env_variables,
        get_cpu_distributed_information,
        get_int_from_env,
        parse_choice_from_env,
        parse_flag_from_env,
        patch_environment,
        purge_accelerate_environment,
        str_to_bool,
    )

__all__ = (
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
)

serve(__name__)
