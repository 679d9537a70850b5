"""The state of a prepared loader: what `state_dict` returns, and how a loader continues from it.

A loader also continues from the states that Hugging Face Accelerate saves: torchdata's, in `dl_state_dict.bin`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from accel_data.order import RNGState
from accel_data.progress import Position, Progress
from accel_data.source import Source
from accel_data.stateful import steps_in
from accel_state.errors import CheckpointError

__all__ = ("load_loader_state", "loader_state")

_STATE_VERSION: Final = 1

_REPEATABLE_ORDER_REMEDY: Final = (
    "Shuffle by seed (use_seedable_sampler=True) or give the sampler a generator; or disable restoring and call "
    "skip_first_batches."
)


def loader_state(source: Source, progress: Progress, restores: bool, name: str) -> dict[str, Any]:
    """The position of a loader as plain values and tensors, equal on all processes except torchdata's state.

    torchdata's state is included, so that its loader and the original library can continue from it. If that state is
    complete, it is returned alone.

    Args:
        source: the source of the loader.
        progress: the position of the loader.
        restores: whether the loader restores positions.
        name: the loader's name in messages.

    Raises:
        CheckpointError: the loader restores positions, and could not restore this one.
    """
    local, iteration, dataset = source.local, progress.iteration, source.local.base.dataset
    theirs = iteration.final_base or iteration.base if progress.resume is None else progress.resume.base
    if source.self_contained and (theirs or progress.resume is None):
        return dict(theirs or source.base_state() or {})
    begun = iteration.rng_state if iteration.steps else local.upcoming_rng()
    position = progress.resume or progress.position(progress.replay or begun)
    if not local.continues_from_base:
        position = dataclasses.replace(position, base=None)
    obstacle = local.obstacle() if restores and position.steps else None
    if obstacle is not None:
        raise CheckpointError(
            f"{name}: cannot save a position that can be restored.",
            obstacle,
            _REPEATABLE_ORDER_REMEDY,
        )
    # An epoch draws no random numbers after its last batch, so the next one begins with the current random state.
    ended = iteration.steps and iteration.end_of_dataloader
    following = local.upcoming_rng() if ended else progress.next_rng_state
    return {
        **(theirs or {}),
        "version": _STATE_VERSION,
        **position.state_dict(),
        "sampler": local.identity(),
        "processes": source.processes,
        "step_size": source.step_size,
        "length": source.length(),
        "following": following.state_dict() if following is not None else None,
        "sample_seed": None if local.sample_seed is None else local.sample_seed.seed,
        **({"mixture": dataset.mixture_state()} if hasattr(dataset, "mixture_state") else {}),
    }


def load_loader_state(state: Mapping[str, Any], source: Source, progress: Progress, restores: bool, name: str) -> None:
    """Let the next iteration of a loader continue from a state; see `PreparedLoader.load_state_dict`.

    Args:
        state: what `loader_state` returned, or a state of torchdata's loader.
        source: the source of the loader.
        progress: the position of the loader.
        restores: whether the loader restores positions.
        name: the loader's name in messages.

    Raises:
        CheckpointError: the loader restores positions, and cannot restore this one exactly.
    """
    if "version" not in state:
        # It was saved by Accelerate or torchdata.
        epoch = progress.epoch
        if restores:
            progress.move_to(epoch, _position_in(state, source, epoch, name))
        return
    local, dataset = source.local, source.local.base.dataset
    position = Position.from_state_dict(state)
    if hasattr(dataset, "load_mixture_state"):
        dataset.load_mixture_state(state.get("mixture"), position.epoch, position.samples or 0)
    same = state["sampler"] == local.identity()
    if local.sample_seed is not None and state["sample_seed"] is not None:
        local.sample_seed.seed = state["sample_seed"]
    resumes = restores and position.steps > 0
    if resumes and same and state["processes"] != source.processes:
        redivided = local.redivided(position.rng_state, position.steps, state["processes"])
        if redivided is not None:
            position = dataclasses.replace(position, rng_state=redivided)
            state = {**state, "processes": source.processes}
    if resumes:
        _check_restorable(state, source, name)
    rng_state = position.rng_state if same else None
    following = state.get("following") if same else None
    progress.next_rng_state = None if following is None else RNGState.from_state_dict(following)
    progress.replay = rng_state if position.steps else None
    if rng_state is not None and not position.steps:
        local.upcoming_rng(rng_state)
    progress.move_to(position.epoch, position if resumes else None)


def _check_restorable(state: Mapping[str, Any], source: Source, name: str) -> None:
    local = source.local
    obstacle = local.obstacle()
    if state["sampler"] != local.identity():
        obstacle = f"It was saved with {state['sampler']}; this loader has {local.identity()}."
    elif state["length"] != source.length():
        obstacle = f"It was saved over {state['length']} samples; this loader has {source.length()}."
    elif source.counts_steps and (state["processes"], state["step_size"]) != (source.processes, source.step_size):
        obstacle = (
            f"Its position is in steps of {state['step_size']} samples on {state['processes']} processes; this "
            f"loader has steps of {source.step_size} on {source.processes}."
        )
    if obstacle is not None:
        raise CheckpointError(
            f"{name}: cannot restore its position in epoch {state['epoch']}.",
            obstacle,
            _REPEATABLE_ORDER_REMEDY,
        )


def _position_in(state: Mapping[str, Any], source: Source, epoch: int, name: str) -> Position | None:
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
