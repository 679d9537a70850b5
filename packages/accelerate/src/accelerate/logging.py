"""What is found at the old address `accelerate.logging`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.logging import MultiProcessAdapter, get_logger
    from accel_state.process import PartialState as PartialState

__all__ = ("MultiProcessAdapter", "get_logger")

serve(__name__)
