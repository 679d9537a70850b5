"""What is found at the old address `accelerate.commands.menu.input`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.menus import KeyHandler, mark, mark_multiple, register

__all__ = ("KeyHandler", "mark", "mark_multiple", "register")

serve(__name__)
