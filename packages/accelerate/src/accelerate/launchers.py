"""What is found at the old address `accelerate.launchers`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.launching import check_place as test_launch
    from accelerate.legacy.launching import debug_launcher, notebook_launcher

__all__ = ("debug_launcher", "notebook_launcher", "test_launch")

serve(__name__)
