"""What is found at the old address `accelerate.local_sgd`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_torch.local_sgd import LocalSGD

__all__ = ("LocalSGD",)

serve(__name__)
