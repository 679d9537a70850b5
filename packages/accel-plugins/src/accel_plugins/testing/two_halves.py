"""A run in two halves: one group of processes saves after the first, and another goes on from there."""

from __future__ import annotations

from typing import Any

from accel_plugins.checkpoint.state import load_folder, save_folder
from accel_plugins.prepared import PreparedObjects
from accel_plugins.testing.reference_loop import Case, Session, batches, make_model
from accel_state.errors import CheckpointError
from accel_state.protocol import barrier

__all__ = ("HALF", "first_half", "second_half")

HALF = 2
"""Batches before the checkpoint."""


def first_half(given: Case, folder: str) -> dict[str, Any]:
    """Train to the checkpoint, write it, and go on: the weights that were saved, and the losses after them."""
    session = Session(given)
    session.train(list(batches(given))[:HALF])
    save_folder(folder, PreparedObjects([session.model], [session.optimizer]), session.strategy, session.process)
    barrier(session.process.transport, "wait_for_everyone")
    weights = session.weights()
    return {"weights": weights, "losses": session.train(list(batches(given))[HALF:])[0]}


def second_half(given: Case, folder: str) -> dict[str, Any]:
    """Go on from the checkpoint with a model that had other weights; or the error that loading ends in."""
    session = Session(given, make_model(9))
    contents = PreparedObjects([session.model], [session.optimizer])
    try:
        load_folder(folder, contents, session.strategy, session.process, allow_missing={"random_states"})
    except CheckpointError as error:
        return {"error": str(error)}
    return {"weights": session.weights(), "losses": session.train(list(batches(given))[HALF:])[0]}
