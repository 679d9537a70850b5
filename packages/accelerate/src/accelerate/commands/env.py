"""What is found at the old address `accelerate.commands.env`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.commands import env_command, env_command_parser
    from accelerate.legacy.commands import env_main as main

__all__ = ("env_command", "env_command_parser", "main")

if __name__ == "__main__":
    from accelerate.legacy.commands import env_main

    raise SystemExit(env_main())

serve(__name__)
