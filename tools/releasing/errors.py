"""What a release tool says when it refuses."""

from __future__ import annotations


class ReleaseError(Exception):
    """What was asked, what stands in the way, and what to do about it."""

    def __init__(self, asked: str, obstacle: str, remedy: str) -> None:
        super().__init__(f"asked:  {asked}\nfailed: {obstacle}\nremedy: {remedy}")
