"""What is found at the old address `accelerate.commands.menu.helpers`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.menus import (
        CURSOR_TO_CHAR,
        TERMINAL_WIDTH,
        Direction,
        clear_line,
        forceWrite,
        linebreak,
        move_cursor,
        reset_cursor,
        writeColor,
    )

__all__ = (
    "CURSOR_TO_CHAR",
    "TERMINAL_WIDTH",
    "Direction",
    "clear_line",
    "forceWrite",
    "linebreak",
    "move_cursor",
    "reset_cursor",
    "writeColor",
)

serve(__name__)
