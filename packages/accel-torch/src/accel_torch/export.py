"""Weights of one model for others to use: in safetensors or torch format, in one file or in shards with an index."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accel_bigmodel.align import has_offloaded_params
from accel_bigmodel.dispatch import get_state_dict_offloaded_model
from accel_bigmodel.weight_files import save_weights
from accel_plugins.layers import strategy_model

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_torch.parts import Parts

__all__ = ("save_model", "state_dict")


def state_dict(parts: Parts, model: Module, unwrap: bool = True) -> dict[str, Any]:
    """All weights of a model, those that are offloaded too; called on every process."""
    if any(has_offloaded_params(module) for module in model.modules()):
        return get_state_dict_offloaded_model(model)
    return parts._engine.strategy.state_dict(strategy_model(model)) if unwrap else model.state_dict()


def save_model(
    parts: Parts,
    model: Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Write the weights of a model; called on every process, and written by those that write files.

    Raises:
        CheckpointError: a weight has no data, or the disk refuses.
    """
    weights = state_dict(parts, model)
    project, topology = parts._options.project, parts.state._process.topology
    writes = topology.is_local_main if project.save_on_each_node else topology.rank == 0
    if writes and parts._engine.strategy.writes_weights():
        folder = os.path.expanduser(os.fspath(save_directory))
        save_weights(weights, folder, max_shard_size, safe_serialization, fsync=project.fsync)
