"""What is found at the old address `accelerate.commands.tpu`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.commands import tpu_command_launcher, tpu_command_parser
    from accelerate.legacy.commands import tpu_main as main

__all__ = ("main", "tpu_command_launcher", "tpu_command_parser")

if __name__ == "__main__":
    from accelerate.legacy.commands import tpu_main

    raise SystemExit(tpu_main())

serve(__name__)
