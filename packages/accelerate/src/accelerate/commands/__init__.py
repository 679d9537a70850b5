"""What is found at the old address `accelerate.commands`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.commands import accelerate_cli as accelerate_cli
    from accelerate.commands import config as config
    from accelerate.commands import env as env
    from accelerate.commands import estimate as estimate
    from accelerate.commands import launch as launch
    from accelerate.commands import menu as menu
    from accelerate.commands import merge as merge
    from accelerate.commands import test as test
    from accelerate.commands import to_fsdp2 as to_fsdp2
    from accelerate.commands import tpu as tpu
    from accelerate.commands import utils as utils

__all__ = ()

serve(__name__)
