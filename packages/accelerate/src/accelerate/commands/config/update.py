"""What is found at the old address `accelerate.commands.config.update`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.command_parts import update_command_parser, update_config, update_config_command
    from accelerate.legacy.command_parts import update_description as description

__all__ = ("description", "update_command_parser", "update_config", "update_config_command")

serve(__name__)
