"""Export and import of one model's weights, as safetensors or torch files, in one file or several with an index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from accel_bigmodel.dispatch import get_state_dict_offloaded_model
from accel_bigmodel.weight_files import load_weights, save_weights
from accel_plugins.layers import strategy_model
from accel_state.errors import CheckpointError, UnknownKind

if TYPE_CHECKING:
    from torch import Tensor

    from accel_torch.session import Session

__all__ = ("put_weights", "save_model", "state_dict")


def state_dict(session: Session, model: Module, unwrap: bool = True) -> dict[str, Any]:
    """All weights of a model, including offloaded ones; called on every process."""
    return session.strategy.state_dict(strategy_model(model)) if unwrap else get_state_dict_offloaded_model(model)


def save_model(
    session: Session,
    model: Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Write the weights of a model to files; called on every process.

    Raises:
        CheckpointError: a weight has no data, or a file cannot be written.
        UnknownKind: it is no model.
    """
    if not isinstance(model, Module):
        raise UnknownKind(
            f"Cannot save a model of type {type(model).__name__}.",
            "save_model() takes a model, and gathers its weights from all processes.",
            "Pass the model; save_weights(weights, folder) writes weights that you have.",
        )
    strategy = session.strategy
    project, topology = session.options.project, session.process.topology
    writes = topology.is_local_main if project.save_on_each_node else topology.rank == 0
    with strategy.global_weights(strategy_model(model)):
        weights = state_dict(session, model)
        if writes and strategy.writes_weights():
            folder = os.path.expanduser(os.fspath(save_directory))
            save_weights(weights, folder, max_shard_size, safe_serialization, fsync=project.fsync)


def put_weights(
    session: Session, model: Module, weights: Mapping[str, Tensor] | str | os.PathLike[str], strict: bool
) -> None:
    """Load weights into a prepared model; called on every process.

    Raises:
        CheckpointError: the weights cannot be read, or do not fit the model.
    """
    tensors = weights if isinstance(weights, Mapping) else load_weights(os.path.expanduser(os.fspath(weights)))
    try:
        session.strategy.load_weights(strategy_model(model), tensors, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"Cannot load weights into {type(session.strategy.unwrap(strategy_model(model))).__name__}.",
            f"They do not fit: {error}",
            "Give the weights of this model, or strict=False to ignore names that differ.",
        ) from error
