"""What is found at the old address `accelerate.commands.launch`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.command_parts import CustomHelpFormatter, clean_option, options_to_group, sagemaker_launcher
    from accelerate.legacy.command_parts import launch_one as deepspeed_launcher
    from accelerate.legacy.command_parts import launch_one as multi_gpu_launcher
    from accelerate.legacy.command_parts import launch_one as simple_launcher
    from accelerate.legacy.command_parts import launch_one as tpu_launcher
    from accelerate.legacy.command_parts import launch_one as tpu_pod_launcher
    from accelerate.legacy.commands import launch_command, launch_command_parser
    from accelerate.legacy.commands import launch_main as main
    from accelerate.legacy.launch_defaults import validate_launch_command as _validate_launch_command

__all__ = (
    "CustomHelpFormatter",
    "_validate_launch_command",
    "clean_option",
    "deepspeed_launcher",
    "launch_command",
    "launch_command_parser",
    "main",
    "multi_gpu_launcher",
    "options_to_group",
    "sagemaker_launcher",
    "simple_launcher",
    "tpu_launcher",
    "tpu_pod_launcher",
)

if __name__ == "__main__":
    from accelerate.legacy.commands import launch_main

    raise SystemExit(launch_main())

serve(__name__)
