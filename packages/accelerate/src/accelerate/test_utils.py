"""The old address `accelerate.test_utils`, which is not provided.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from accelerate.address import refuse

refuse(__name__)
