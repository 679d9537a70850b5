"""What is found at the old address `accelerate.commands.config`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.commands.config import cluster as cluster
    from accelerate.commands.config import config as config
    from accelerate.commands.config import config_args as config_args
    from accelerate.commands.config import config_utils as config_utils
    from accelerate.commands.config import default as default
    from accelerate.commands.config import sagemaker as sagemaker
    from accelerate.commands.config import update as update
    from accelerate.legacy.command_parts import default_command_parser, update_command_parser
    from accelerate.legacy.commands import config_command_parser
    from accelerate.legacy.commands import config_command_parser as get_config_parser
    from accelerate.legacy.commands import config_main as main
    from accelerate.legacy.config_classes import load_config_from_file
    from accelerate.legacy.config_files import default_config_file

__all__ = (
    "config_command_parser",
    "default_command_parser",
    "default_config_file",
    "get_config_parser",
    "load_config_from_file",
    "main",
    "update_command_parser",
)

if __name__ == "__main__":
    from accelerate.legacy.commands import config_main

    raise SystemExit(config_main())

serve(__name__)
