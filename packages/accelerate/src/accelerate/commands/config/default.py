"""What is found at the old address `accelerate.commands.config.default`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.command_parts import default_command_parser, default_config_command, write_basic_config
    from accelerate.legacy.command_parts import default_description as description

__all__ = ("default_command_parser", "default_config_command", "description", "write_basic_config")

serve(__name__)
