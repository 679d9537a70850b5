"""What is found at the old address `accelerate.commands.accelerate_cli`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.commands import main

__all__ = ("main",)

if __name__ == "__main__":
    from accelerate.legacy.commands import main

    raise SystemExit(main())

serve(__name__)
