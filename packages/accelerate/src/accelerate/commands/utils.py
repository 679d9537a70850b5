"""What is found at the old address `accelerate.commands.utils`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.command_parts import CustomArgumentGroup
    from accelerate.legacy.parsing import CustomArgumentParser

__all__ = ("CustomArgumentGroup", "CustomArgumentParser")

serve(__name__)
