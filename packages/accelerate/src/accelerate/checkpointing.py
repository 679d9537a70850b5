"""What is found at the old address `accelerate.checkpointing`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.checkpoints import (
        load_accelerator_state,
        load_custom_state,
        save_accelerator_state,
        save_custom_state,
    )

__all__ = ("load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state")

serve(__name__)
