"""What is found at the old address `accelerate.commands.menu.keymap`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.menus import ARROW_KEY_FLAG, KEYMAP, get_character, get_raw_chars

__all__ = ("ARROW_KEY_FLAG", "KEYMAP", "get_character", "get_raw_chars")

serve(__name__)
