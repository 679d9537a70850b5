"""What is found at the old address `accelerate.commands.menu.cursor`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.menus import hide, hide_cursor, show_cursor

__all__ = ("hide", "hide_cursor", "show_cursor")

serve(__name__)
