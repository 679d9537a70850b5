"""What is found at the old address `accelerate.utils.versions`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.settings.versions import compare_versions, is_torch_version, torch_version

__all__ = ("compare_versions", "is_torch_version", "torch_version")

serve(__name__)
