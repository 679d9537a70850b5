"""What is found at the old address `accelerate.commands.merge`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.command_parts import merge_description as description
    from accelerate.legacy.commands import merge_command, merge_command_parser
    from accelerate.legacy.commands import merge_main as main

__all__ = ("description", "main", "merge_command", "merge_command_parser")

if __name__ == "__main__":
    from accelerate.legacy.commands import merge_main

    raise SystemExit(merge_main())

serve(__name__)
