"""Weights on their way into a sharded model: from the first process, from a mapping, or from the meta device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module

from accel_plugins.fsdp.building import is_built_in_shards
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.parameters import preserved_ties
from accel_state.errors import CheckpointError, Conflict

__all__ = (
    "check_weights",
    "distribute",
    "place_values",
    "put",
    "send_from_first",
    "to_device",
    "train_in_fp32",
    "weights_of_first",
)

_logger: Final = logging.getLogger(__name__)


def check_weights(model: Module, config: FullyShardedDataParallelPlugin, rank: int) -> None:
    """Refuse a model without weights where nobody would give it any."""
    if is_built_in_shards(model):
        return
    empty = next((name for name, tensor in _tensors(model) if tensor.is_meta), None)
    if empty is not None and config.param_init_fn is None and (rank == 0 or not config.cpu_ram_efficient_loading):
        raise Conflict(
            f"{type(model).__name__} was given to prepare().",
            f"{empty!r} is on the meta device of process {rank} and has no values.",
            "Load its weights on the first process at least, and set cpu_ram_efficient_loading=True.",
        )


def _tensors(model: Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def to_device(model: Module, device: torch.device, initialise: Callable[[Module], None] | None = None) -> None:
    """Move a model to the device; what is on the meta device gets memory there, and stays tied as it was.

    Args:
        model: the model.
        device: where it goes.
        initialise: gives the tensors of one module memory and values, where they have none.
    """
    if initialise is not None:
        for module in list(model.modules()):
            if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                initialise(module)
    if not any(tensor.is_meta for _, tensor in _tensors(model)):
        model.to(device)
        return
    with preserved_ties(model):
        model.to_empty(device=device)


def place_values(model: Module, device: torch.device) -> Module:
    """Move what has values to the device, in place; what was built in shards stays on the meta device."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


def train_in_fp32(model: Module) -> None:
    """Let the optimizer step on fp32 weights: mixed precision gathers copies of them in 16 bits for forward.

    Small updates would be lost in 16 bits, and FSDP divides parameters of one dtype only. Frozen parameters and buffers
    keep their dtype.
    """
    changed = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
            changed += 1
    if changed:
        _logger.info("%s: %d parameters train in fp32, as checkpoints hold them.", type(model).__name__, changed)


def weights_of_first(model: Module, rank: int) -> dict[str, Tensor]:
    """All weights and buffers on the first process, by name; empty elsewhere."""
    if rank != 0:
        return {}
    kept = {**dict(model.named_buffers()), **model.state_dict()}
    return {name: value.detach().cpu().clone() for name, value in kept.items()}


def send_from_first(model: Module, device: torch.device, mesh: DeviceMesh | None = None) -> None:
    """Give every process the weights and buffers of the first, one tensor at a time and in place.

    Args:
        model: whole on every process, or sharded over an axis of the mesh by tensor parallelism. Processes with the
            same shard get it from the first of them.
        device: of the process groups; tensors that are elsewhere are copied there on their way.
        mesh: of the run, or None without axes.
    """
    for _, tensor in _tensors(model):
        value = tensor.detach()
        if not isinstance(value, DTensor):
            _send(value, device, None)
        elif mesh is not None:
            for axis in mesh.mesh_dim_names or ():
                if axis not in (value.device_mesh.mesh_dim_names or ()):
                    _send(value.to_local(), device, mesh[axis].get_group())


def _send(tensor: Tensor, device: torch.device, group: torch.distributed.ProcessGroup | None) -> None:
    """Overwrite a tensor by that of the first process of a group."""
    fits = tensor.device.type == device.type and tensor.is_contiguous()
    sent = tensor if fits else tensor.to(device, copy=True, memory_format=torch.contiguous_format)
    torch.distributed.broadcast(sent, group=group, group_src=0)
    if not fits:
        tensor.copy_(sent)


def distribute(model: Module, source: Mapping[str, Tensor]) -> None:
    """Give every process its shards of the first process's weights, and its buffers."""
    persistent = set(model.state_dict())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    set_model_state_dict(model, {name: value for name, value in source.items() if name in persistent}, options=options)
    for name, buffer in model.named_buffers():
        if name not in persistent:
            _broadcast(buffer, source.get(name))


def _broadcast(buffer: Tensor, value: Tensor | None) -> None:
    if value is not None:
        buffer.copy_(value)
    torch.distributed.broadcast(buffer, src=0)


def put(model: Module, weights: Mapping[str, Any], *, strict: bool = True) -> None:
    """Put complete weights, which every process has, into a sharded model.

    Raises:
        CheckpointError: names or shapes do not agree.
    """
    try:
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True, strict=strict))
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"Cannot load weights into {type(model).__name__}.",
            str(error),
            "Build the model with the configuration it was saved with.",
        ) from error
