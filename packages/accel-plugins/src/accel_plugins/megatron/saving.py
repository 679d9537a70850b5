"""Checkpoints by Megatron-LM's own distributed format, which another number of processes can read too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_ops.agreement import raise_on_any_rank
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.shards import check_objects
from accel_plugins.megatron.parallel import dist_checkpointing, mapping, parallel_state, tensor_parallel
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state import current
from accel_state.errors import CheckpointError, NotOffered
from accel_state.process import wait_for_everyone

if TYPE_CHECKING:
    from accel_plugins.megatron.config import MegatronLMPlugin

__all__ = ("FOLDER", "load_engine", "save_engine")

FOLDER: Final = "megatron"
"""Name of the folder of a checkpoint that Megatron-LM fills."""

_GENERATORS: Final = "rng_state"
_FORM: Final = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Divided optimizer states are written in the form that can be read in any other division."""


def save_engine(engine: Any, folder: Path, plugin: MegatronLMPlugin) -> None:
    """Let every process write its part of an engine's state.

    Raises:
        NotOffered: Megatron-LM could not read what it would write.
    """
    if plugin.use_distributed_optimizer and not plugin.no_save_optim:
        _demand_readable(inner_optimizer(engine.optimizer))
    place = folder / FOLDER
    if _is_first():
        place.mkdir(parents=True, exist_ok=True)
    # The folder exists now.
    wait_for_everyone()
    state = _sharded(engine, loading=False, optimizer=not plugin.no_save_optim)
    state[_GENERATORS] = _generators()
    state["degrees"] = _degrees(plugin)
    state["iteration"] = engine.iteration
    state["consumed_samples"] = list(plugin.consumed_samples or ())
    if engine.scheduler is not None:
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    dist_checkpointing.save(state, str(place))


def load_engine(engine: Any, folder: Path, plugin: MegatronLMPlugin) -> None:
    """Read what `save` wrote, on as many processes or on others.

    Generators are restored where the model is divided as it was; their states are of no use to other parts.

    Raises:
        CheckpointError: it is missing, damaged, holds code, or is of another model.
    """
    place = folder / FOLDER
    asked = f"Cannot load the Megatron-LM checkpoint {place}."
    process = current.process_or_start()
    common = raise_on_any_rank(process, "megatron", lambda: _look_through(asked, place), asked, error=CheckpointError)
    wants_optimizer = not plugin.no_load_optim
    if wants_optimizer and not common["has_optimizer"]:
        raise CheckpointError(
            asked,
            "It was written without optimizer states.",
            "Set MegatronLMPlugin(no_load_optim=True) to begin with new ones.",
        )
    state = _sharded(engine, loading=True, optimizer=wants_optimizer)
    same = common["degrees"] == _degrees(plugin)
    if same:
        state[_GENERATORS] = _generators()
    try:
        found = dist_checkpointing.load(state, str(place))
    except Exception as error:
        # Its errors are of many kinds, and each means that the files do not fit.
        raise CheckpointError(
            asked, f"It does not fit this model: {error}", "Load a checkpoint of a model of the same sizes."
        ) from error
    _restore(engine, plugin, found, same and wants_optimizer, wants_optimizer)


def _restore(engine: Any, plugin: MegatronLMPlugin, found: Any, generators: bool, optimizer: bool) -> None:
    for index, part in enumerate(engine.module):
        _bare(part).load_state_dict(found[_part_name(index)])
    engine.iteration = found["iteration"]
    plugin.consumed_samples = list(found["consumed_samples"])
    if not optimizer:
        # What the optimizer keeps in 32 bits begins with the weights that were read.
        inner_optimizer(engine.optimizer).reload_model_params()
        return
    inner_optimizer(engine.optimizer).load_state_dict(found["optimizer"])
    if engine.scheduler is not None and "opt_param_scheduler" in found:
        engine.scheduler.load_state_dict(found["opt_param_scheduler"])
    if generators:
        tensor_parallel.get_cuda_rng_tracker().set_states(found[_GENERATORS])


def _sharded(engine: Any, loading: bool, optimizer: bool) -> dict[str, Any]:
    """The tensors that Megatron-LM writes or fills, with the position of each shard in the full tensor."""
    models = {
        _part_name(index): _bare(part).sharded_state_dict(metadata=_FORM) for index, part in enumerate(engine.module)
    }
    state: dict[str, Any] = dict(models)
    if optimizer:
        if loading:
            _begin_states(inner_optimizer(engine.optimizer))
        every = {name: value for shards in models.values() for name, value in shards.items()}
        state["optimizer"] = inner_optimizer(engine.optimizer).sharded_state_dict(
            every, is_loading=loading, metadata=_FORM
        )
    if not loading:
        state["has_optimizer"] = optimizer
    return state


def _demand_readable(optimizer: Any) -> None:
    """Megatron-LM does not read divided states again where torch's Adam, which also counts steps, keeps them."""
    if any(
        isinstance(one.optimizer, torch.optim.Adam) for one in getattr(optimizer, "chained_optimizers", [optimizer])
    ):
        raise NotOffered(
            "Cannot write a checkpoint with sharded optimizer states (use_distributed_optimizer=True).",
            "Megatron-LM steps with torch's Adam here, whose divided states it writes and cannot read again.",
            "Install transformer-engine or apex, whose Adam it reads, or set no_save_optim=True.",
        )


def _begin_states(optimizer: Any) -> None:
    """Give an optimizer that has not stepped the states that are to be filled; torch's want their step as well."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.optimizer.state:
            continue
        one.init_state_fn(one.optimizer, one.config)
        if isinstance(one.optimizer, torch.optim.Adam):
            for state in one.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))


def _bare(part: Any) -> Any:
    """A part of a model without what averages its gradients and casts its inputs."""
    while hasattr(part, "module"):
        part = part.module
    return part


def _part_name(index: int) -> str:
    return "model" if index == 0 else f"model{index}"


def _generators() -> Any:
    """The generators for parts of tensors: one set for each part of the model, equal where samples differ."""
    place = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    whole = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return mapping.ShardedObject(_GENERATORS, states, whole, place, replica_id=replica)


def _degrees(plugin: MegatronLMPlugin) -> list[int]:
    return [plugin.tp_degree, plugin.pp_degree]


def _is_first() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0


def _look_through(asked: str, place: Path) -> dict[str, Any]:
    """What the folder holds besides tensors; nothing in the files is run."""
    if not (place / ".metadata").is_file():
        raise CheckpointError(asked, "There is no such folder with files of Megatron-LM.", "Name another checkpoint.")
    check_objects(place)
    pickled.read(place / "common.pt", map_location="meta")
    try:
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(place))
    except Exception as error:
        raise CheckpointError(asked, f"common.pt cannot be read: {error}", "Load another checkpoint.") from error
    missing = {"degrees", "iteration", "has_optimizer"} - common.keys()
    if missing:
        raise CheckpointError(
            asked, f"It lacks {', '.join(sorted(missing))}.", "Load one that was written by save_state()."
        )
    return common
