"""FSDP v2 by SPMD: one process uses several devices as one, and specifies how parameters and batches are sharded.

torch_xla's `SpmdFullyShardedDataParallel` shards the parameters of a model; the compiler derives the necessary
collectives. Modules inside are not wrapped, so names and classes in the user's model do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as runtime
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch_xla.distributed.spmd.xla_sharding import apply_backward_optimization_barrier
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from accel_ops.tree import recursively_apply
from accel_state.errors import SettingError

__all__ = ("BatchSharding", "mesh_of_all_devices", "shard_model", "shard_parameters", "shard_state", "unwrapped")

_SHARD_AXIS: Final = "fsdp"
"""The axis name that torch_xla's wrapper expects."""


def mesh_of_all_devices() -> Any:
    """A mesh of one axis over the devices of all processes."""
    devices = runtime.global_runtime_device_count()
    return spmd.Mesh(np.arange(devices), (devices,), (_SHARD_AXIS,))


class BatchSharding:
    """Shards the tensors of a batch along their first dim, the samples.

    It replaces torch_xla's `ShardingSpec`, which supports only one number of dims.

    Args:
        mesh: the devices.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self.minibatch: bool = runtime.process_count() > 1
        """Whether each process has a different batch."""

    def xla_spec(self, tensor: Tensor) -> Any:
        """The sharding of a tensor, called by torch_xla; None replicates it on every device."""
        if tensor.ndim == 0:
            return None
        return spmd.ShardingSpec(self._mesh, _by_first_dim(tensor), minibatch=self.minibatch).xla_spec(tensor)


def shard_model(model: Module, mesh: Any, blocks: Sequence[str]) -> Module:
    """Shard a model's parameters among the devices of a mesh, and the outputs of the model and its blocks.

    Raises:
        SettingError: no module has one of the class names.
    """
    for block in _blocks(model, blocks):
        block.register_forward_hook(lambda module, inputs, output: _shard_output(output, mesh))
        apply_backward_optimization_barrier(block)
    # torch warns about hooks that run for inputs without gradients, such as the wrapper's hook on the whole model, and
    # about hooks that never run because an output is not a tensor. The hooks only prevent too much fusion.
    for message in ("Full backward hook is firing", "For backward hooks to be called, module output should be"):
        warnings.filterwarnings("ignore", message, UserWarning)
    wrapped: Module = SpmdFullyShardedDataParallel(model, mesh=mesh, shard_output=_shard_output)
    return wrapped


def unwrapped(model: Module) -> Module | None:
    """The model inside a result of `shard_model`, or None for another model."""
    inner: Any = model.module if isinstance(model, SpmdFullyShardedDataParallel) else None
    return inner  # type: ignore[no-any-return]


def shard_state(optimizer: Optimizer, mesh: Any) -> None:
    """Shard an optimizer's state like its parameters, where it is replicated."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.device == parameter.device:
                _shard_parameter(value, mesh)


def shard_parameters(model: Module, mesh: Any) -> None:
    """Shard the replicated parameters of a model, for example after loading."""
    for parameter in model.parameters():
        _shard_parameter(parameter, mesh)


def _shard_parameter(tensor: Tensor, mesh: Any) -> None:
    if tensor.ndim > 0 and not torch_xla._XLAC._get_xla_sharding_spec(tensor):
        longest = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim])
        spmd.mark_sharding(tensor, mesh, tuple(_SHARD_AXIS if dim == longest else None for dim in range(tensor.ndim)))


def _shard_output(output: Any, mesh: Any) -> None:
    """Shard the tensors in an output of any structure along their first dim."""

    def mark(tensor: Tensor) -> Tensor:
        if tensor.ndim > 0:
            spmd.mark_sharding(tensor, mesh, _by_first_dim(tensor))
        return tensor

    recursively_apply(mark, output)


def _by_first_dim(tensor: Tensor) -> tuple[str | None, ...]:
    return (_SHARD_AXIS, *(None for _ in range(tensor.ndim - 1)))


def _blocks(model: Module, names: Sequence[str]) -> list[Module]:
    by_class = {name: [module for module in model.modules() if type(module).__name__ == name] for name in names}
    for name, modules in by_class.items():
        if not modules:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise SettingError(
                f"Cannot use XLAPlugin(blocks=({name!r},)).",
                f"{type(model).__name__} has no module of that class. Its classes are: {', '.join(classes)}.",
                "Use one of these classes.",
            )
    return [module for modules in by_class.values() for module in modules]
