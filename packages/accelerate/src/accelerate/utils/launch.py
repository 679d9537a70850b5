"""What is found at the old address `accelerate.utils.launch`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.launching import (
        PrepareForLaunch,
        env_var_path_add,
        prepare_deepspeed_cmd_env,
        prepare_extend_env_parallelism_config,
        prepare_multi_gpu_env,
        prepare_sagemager_args_inputs,
        prepare_simple_launcher_cmd_env,
        prepare_tpu,
        setup_fp8_env,
    )

__all__ = (
    "PrepareForLaunch",
    "env_var_path_add",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
)

serve(__name__)
