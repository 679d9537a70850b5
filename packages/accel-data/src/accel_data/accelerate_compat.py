"""Positions in the states that Hugging Face Accelerate saves: those of torchdata's loader, in `dl_state_dict.bin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_data.progress import Position
from accel_data.source import Source
from accel_data.stateful import steps_in
from accel_state.errors import CheckpointError

__all__ = ("is_torchdata_state", "position_in")


def is_torchdata_state(state: Mapping[str, Any]) -> bool:
    """Whether a state was saved by Accelerate or torchdata, and not by a prepared loader."""
    return "version" not in state


def position_in(state: Mapping[str, Any], source: Source, epoch: int, name: str) -> Position | None:
    """Where a state continues the epoch; None when the epoch has not begun or is over.

    Args:
        state: of torchdata's loader.
        source: of the loader that continues.
        epoch: number of the epoch, which such a state does not hold.
        name: of the loader in a message.

    Raises:
        CheckpointError: the state is not one of a loader, or it does not hold enough to continue exactly.
    """
    steps = steps_in(state)
    if steps is None:
        raise CheckpointError(
            f"{name}: cannot load this state.",
            f"It is not the state of a loader: it has {', '.join(sorted(map(str, state))) or 'nothing'}.",
            "Give what state_dict() of a loader returned, or the dl_state_dict.bin of a checkpoint.",
        )
    if not steps:
        return None
    obstacle = source.obstacle_to_counting()
    if obstacle is not None:
        raise CheckpointError(
            f"{name}: cannot restore its position from a state of the original library.",
            obstacle,
            "Leave restoring off (use_stateful_dataloader=False) and call skip_first_batches.",
        )
    samples = None if source.counts_steps or source.step_size is None else steps * source.step_size
    base = dict(state) if source.continues_from_base and source.processes == 1 else None
    return Position(epoch, steps, samples, None, base)
