"""What is found at the old address `accelerate.utils.launch`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from shutil import which as which

    from accel_cli.launch.mpi import subprocess as subprocess
    from accel_cli.launch.sagemaker import hyperparameters as _convert_nargs_to_dict
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
    "_convert_nargs_to_dict",
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
