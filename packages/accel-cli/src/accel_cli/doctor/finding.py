"""What an examination found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ("FINE", "TROUBLE", "WORRY", "Finding", "lines_of")

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


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Findings as people read them, one a line, each with its remedy below."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<7}  {finding.subject:<{width}}  {finding.told}")
        if finding.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {finding.remedy}")
    return lines
