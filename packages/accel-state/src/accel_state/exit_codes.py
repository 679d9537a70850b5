"""Exit codes that mean something between a script and whoever started it."""

from __future__ import annotations

from typing import Final

__all__ = ("RESUME",)

RESUME: Final = 75
"""The run was asked to end, saved a checkpoint and can be resumed: start it again (EX_TEMPFAIL of sysexits.h)."""
