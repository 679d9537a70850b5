"""Reads positions from the states that Hugging Face Accelerate saves: torchdata's, in `dl_state_dict.bin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_data.progress import Position
from accel_data.source import Source
from accel_data.stateful import steps_in
from accel_state.errors import CheckpointError

__all__ = ("is_torchdata_state", "position_in")


def is_torchdata_state(state: Mapping[str, Any]) -> bool:
    """Whether a state was saved by Accelerate or torchdata instead of a prepared loader."""
    return "version" not in state


def position_in(state: Mapping[str, Any], source: Source, epoch: int, name: str) -> Position | None:
    """The position of a state in its epoch; None if the epoch has not begun or is over.

    Args:
        state: the state of torchdata's loader.
        source: the source of the loader that continues.
        epoch: number of the epoch, which such a state does not contain.
        name: the loader's name in messages.

    Raises:
        CheckpointError: the state is not that of a loader, or does not contain enough to continue exactly.
    """
    steps = steps_in(state)
    if steps is None:
        raise CheckpointError(
            f"{name}: cannot load this state.",
            f"It is not the state of a loader: it has {', '.join(sorted(map(str, state))) or 'nothing'}.",
            "Give the result of a loader's state_dict(), or the dl_state_dict.bin of a checkpoint.",
        )
    if not steps:
        return None
    obstacle = source.obstacle_to_counting()
    if obstacle is not None:
        raise CheckpointError(
            f"{name}: cannot restore its position from a state of the original library.",
            obstacle,
            "Disable restoring (use_stateful_dataloader=False) and call skip_first_batches.",
        )
    samples = None if source.counts_steps or source.step_size is None else steps * source.step_size
    base = dict(state) if source.local.continues_from_base and source.processes == 1 else None
    return Position(epoch, steps, samples, None, base)
