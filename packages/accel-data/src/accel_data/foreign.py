"""Positions in the states that the original library saves: those of torchdata's loader, in `dl_state_dict.bin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_data.progress import Position
from accel_data.sources import Source
from accel_data.stateful import steps_in
from accel_state.errors import CheckpointError

__all__ = ("is_foreign", "position_in")


def is_foreign(state: Mapping[str, Any]) -> bool:
    """Whether a state is not one of ours."""
    return "version" not in state


def position_in(state: Mapping[str, Any], source: Source, epoch: int, name: str) -> Position | None:
    """Where the epoch continues that a state tells of; None when it has not begun or is over.

    Args:
        state: of torchdata's loader.
        source: what the loader that is to continue reads from.
        epoch: number of the epoch, which such a state does not hold.
        name: what to call the loader in a message.

    Raises:
        CheckpointError: it is no such state, or it does not say enough to continue exactly.
    """
    steps = steps_in(state)
    if steps is None:
        raise CheckpointError(
            f"{name}: a state was to be loaded.",
            f"It is none of a loader: it has {', '.join(sorted(map(str, state))) or 'nothing'}.",
            "Give what state_dict() of a loader returned, or the dl_state_dict.bin of a checkpoint.",
        )
    if not steps:
        return None
    obstacle = source.foreign_obstacle()
    if obstacle is not None:
        raise CheckpointError(
            f"{name}: its position in a state of the original library was to be restored.",
            obstacle,
            "Leave restoring off (use_stateful_dataloader=False) and call skip_first_batches.",
        )
    samples = None if source.counts_steps or source.step_size is None else steps * source.step_size
    base = dict(state) if source.continues_from_base and source.processes == 1 else None
    return Position(epoch, steps, samples, None, base)
