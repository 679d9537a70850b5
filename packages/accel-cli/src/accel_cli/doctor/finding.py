"""What an examination found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ("FINE", "TROUBLE", "WORRY", "Finding")

FINE: Final = "fine"
WORRY: Final = "worry"
TROUBLE: Final = "trouble"


@dataclass(frozen=True)
class Finding:
    """One result.

    Args:
        subject: what was looked at.
        verdict: `FINE`, `WORRY` (a run may go wrong) or `TROUBLE` (a run will).
        told: what was seen.
        remedy: what to do, empty when nothing has to be done.
    """

    subject: str
    verdict: str
    told: str
    remedy: str = ""
