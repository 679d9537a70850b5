"""What is found at the old address `accelerate.commands.estimate`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.commands import estimate_command, estimate_command_parser
    from accelerate.legacy.commands import estimate_main as main

__all__ = ("estimate_command", "estimate_command_parser", "main")

if __name__ == "__main__":
    from accelerate.legacy.commands import estimate_main

    raise SystemExit(estimate_main())

serve(__name__)
