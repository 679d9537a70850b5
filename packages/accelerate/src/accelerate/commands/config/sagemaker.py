"""What is found at the old address `accelerate.commands.config.sagemaker`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.command_parts import get_sagemaker_input

__all__ = ("get_sagemaker_input",)

serve(__name__)
