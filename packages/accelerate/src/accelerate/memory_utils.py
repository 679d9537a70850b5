"""What is found at the old address `accelerate.memory_utils`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.memory import find_executable_batch_size as find_executable_batch_size

__all__ = ()

serve(__name__)
