"""What is found at the old address `accelerate.commands.config.config`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.command_parts import config_description as description
    from accelerate.legacy.command_parts import get_user_input
    from accelerate.legacy.commands import config_command, config_command_parser
    from accelerate.legacy.commands import config_main as main

__all__ = ("config_command", "config_command_parser", "description", "get_user_input", "main")

if __name__ == "__main__":
    from accelerate.legacy.commands import config_main

    raise SystemExit(config_main())

serve(__name__)
