"""Finds processes that have ended although the others still wait for them, so that the run need not wait forever."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from accel_state.watch.status import read_statuses

__all__ = ("ended_early",)

_PATIENCE_S: Final = 2.0
"""Seconds in one collective of all processes after which it cannot end without the process that has gone."""

_RENDEZVOUS: Final = "waiting for others"


def ended_early(folder: str, codes: Mapping[int, int], processes: int) -> list[int]:
    """Ranks that ended with exit code 0 while every other rank waits for all processes; empty if that is not known.

    Args:
        folder: the folder in which the processes write their position.
        codes: exit codes of the processes that have ended, by rank.
        processes: number of processes of the run.
    """
    waiting = set(range(processes)) - set(codes)
    if not codes or not waiting or any(codes.values()):
        return []
    positions, now = read_statuses(folder), time.monotonic()
    for rank in waiting:
        seen = positions.get(rank)
        if seen is None:
            return []
        in_collective = seen.since if seen.active and not seen.group else 0.0
        since = in_collective or (seen.state_since if seen.state == _RENDEZVOUS else 0.0)
        if not since or now - since < _PATIENCE_S:
            return []
    return sorted(codes)
