"""What is found at the old address `accelerate.utils.torch_xla`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_plugins.xla.install import install_xla

__all__ = ("install_xla",)

serve(__name__)
