"""What is found at the old address `accelerate.utils.tqdm`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.availability import is_tqdm_available as is_tqdm_available
    from accel_state.console import tqdm
    from accel_state.process import PartialState as PartialState

__all__ = ("tqdm",)

serve(__name__)
