"""What is found at the old address `accelerate.commands.menu`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.commands.menu import cursor as cursor
    from accelerate.commands.menu import helpers as helpers
    from accelerate.commands.menu import input as input
    from accelerate.commands.menu import keymap as keymap
    from accelerate.commands.menu import selection_menu as selection_menu
    from accelerate.legacy.menus import BulletMenu

__all__ = ("BulletMenu",)

serve(__name__)
