"""What is found at the old address `accelerate.commands.menu.selection_menu`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.menus import BulletMenu, in_colab

__all__ = ("BulletMenu", "in_colab")

serve(__name__)
