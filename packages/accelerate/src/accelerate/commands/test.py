"""What is found at the old address `accelerate.commands.test`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.commands import self_test_command as test_command
    from accelerate.legacy.commands import self_test_command_parser as test_command_parser
    from accelerate.legacy.commands import self_test_main as main

__all__ = ("main", "test_command", "test_command_parser")

if __name__ == "__main__":
    from accelerate.legacy.commands import self_test_main

    raise SystemExit(self_test_main())

serve(__name__)
