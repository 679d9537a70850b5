"""The strategy on XLA devices: each step is traced into one compiled graph, which ends after the optimizer step.

A process has one device, or uses all its devices as one (FSDP v2 by SPMD): torch_xla's
`SpmdFullyShardedDataParallel` shards the parameters of a model, and the compiler derives the necessary collectives.
Modules inside are not wrapped, so names and classes in the user's model do not change.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xla_model
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as runtime
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch_xla.distributed.parallel_loader import MpDeviceLoader
from torch_xla.distributed.spmd.xla_sharding import apply_backward_optimization_barrier
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from accel_ops.conversion import send_to_device
from accel_ops.tree import recursively_apply
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.manifest import ObjectKind
from accel_plugins.precision.base import Closure
from accel_plugins.strategy import Strategy
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_plugins.xla.config import XLAPlugin
from accel_state.errors import Conflict, NotOffered, NotReady, SettingError
from accel_state.settings.environ import publish

__all__ = (
    "XLADeviceTransfer",
    "XLAStrategy",
)

_SHARD_AXIS: Final = "fsdp"
"""The axis name that torch_xla's wrapper expects."""

_DOWNCAST_VARIABLE: Final = "XLA_DOWNCAST_BF16"
"""The variable that torch_xla reads once, when a device is first used."""


class XLAStrategy(Strategy):
    """Trains on devices of torch_xla."""

    config: XLAPlugin

    def __init__(self, context: Context, config: XLAPlugin) -> None:
        super().__init__(context, config)
        self._reduced: set[int] = set()
        _check_device(context)
        if config.downcast_bf16:
            _downcast(context)
        self._mesh = _mesh(context, config)

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        for model in bundle.models:
            if any(parameter.is_meta for parameter in model.parameters()):
                raise NotOffered(
                    f"Cannot prepare {type(model).__name__}.",
                    "Some of its parameters are on the meta device and have no values.",
                    "Load its weights on the CPU first.",
                )

    def setup(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            self._make_equal(model)
        if self._mesh is not None:
            bundle.models[:] = [_shard_model(model, self._mesh, self.config.blocks) for model in bundle.models]
        for optimizer in bundle.optimizers:
            if optimizer.state:
                # An optimizer that has stepped: loading its own state moves it to the device of its parameters.
                optimizer.load_state_dict(optimizer.state_dict())
            self._shard_state(optimizer)
        torch_xla.sync()
        return bundle

    def _make_equal(self, model: Module) -> None:
        """Broadcast the weights of the first process."""
        if self.context.process.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                self.context.process.transport.broadcast(tensor.detach(), 0).wait()

    def unwrap(self, model: Module) -> Module:
        if isinstance(model, SpmdFullyShardedDataParallel):
            inner: Any = model.module
            assert isinstance(inner, Module)
            return inner
        return model

    def wrap_loader(self, loader: Any) -> Any:
        """The loader with torch_xla's transfer to the device, unless device placement is off."""
        if getattr(loader, "device", None) is not None:
            sharding = None if self._mesh is None else _BatchSharding(self._mesh)
            loader.device_transfer = XLADeviceTransfer(self.context.process.device, self.config.prefetch, sharding)
        return loader

    # ------------------------------------------------------------------ one step

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        super().backward(loss, model, **kwargs)
        self._reduced.clear()

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._reduced:
            self._reduced.add(id(optimizer))
            if self._mesh is None:
                xla_model.reduce_gradients(optimizer)
            self.context.gradient.is_xla_gradients_synced = True

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        stepped = super().step(optimizer, None if closure is None else self._anew(optimizer, closure))
        # A script may compute the next gradients without calling `backward` of the strategy.
        self._reduced.discard(id(optimizer))
        self.context.gradient.is_xla_gradients_synced = False
        # This ends a step also in a loop without a prepared loader.
        torch_xla.sync()
        return stepped

    def _anew(self, optimizer: Optimizer, closure: Closure) -> Closure:
        """A closure whose gradients are averaged at each call."""

        def compute() -> Any:
            self._reduced.discard(id(optimizer))
            return closure()

        return compute

    def average_parameters(self, model: Module) -> None:
        process = self.context.process
        if process.world_size > 1:
            for parameter in self.unwrap(model).parameters():
                # `detach()` instead of `.data`: the write then increments the parameter's version, which snapshots
                # compare.
                mean = parameter.detach()
                process.transport.all_reduce(mean).wait()
                mean.div_(process.world_size)

    # ------------------------------------------------------------------ checkpoints

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        return _on_host(super().collect(kind, item))

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        super().load(kind, item, folder, index, **options)
        if kind is ObjectKind.MODEL:
            self._shard_parameters(item)
        elif kind is ObjectKind.OPTIMIZER:
            self._shard_state(inner_optimizer(item))

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        state: dict[str, Tensor] = _on_host(super().state_dict(model))
        return state

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        super().load_weights(model, weights, strict)
        self._shard_parameters(model)

    def writes_weights(self) -> bool:
        return self.context.process.rank == 0

    def gradients(self, model: Module) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = _on_host(super().gradients(model))
        return gradients

    def _shard_parameters(self, model: Module) -> None:
        """Shard the replicated parameters of a model, for example after loading."""
        for parameter in () if self._mesh is None else self.unwrap(model).parameters():
            _shard_parameter(parameter, self._mesh)
        torch_xla.sync()

    def _shard_state(self, optimizer: Optimizer) -> None:
        """Shard an optimizer's state like its parameters, where it is replicated."""
        for parameter, state in () if self._mesh is None else optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.device == parameter.device:
                    _shard_parameter(value, self._mesh)


def _on_host(state: Any) -> Any:
    """A state with its tensors on the CPU, copied after their graph was executed as a whole."""
    torch_xla.sync()
    return recursively_apply(lambda tensor: tensor.detach().cpu(), state)


def _check_device(context: Context) -> None:
    family = context.process.family
    if not hasattr(family, "use_all_devices"):
        raise Conflict(
            "Cannot use the backend 'xla'.",
            f"The device of this process is {context.process.device}, which is not a torch_xla device.",
            "Set PJRT_DEVICE (TPU, or CPU to try it), or do not choose this backend.",
        )


def _mesh(context: Context, config: XLAPlugin) -> Any:
    """The mesh of all devices, if the process uses all of them (SPMD), or None."""
    family: Any = context.process.family
    if not config.fsdp:
        _check_one_device(context)
        return None
    if runtime.world_size() > 1:
        raise Conflict(
            "Cannot use XLAPlugin(fsdp=True).",
            f"torch_xla started {runtime.world_size()} replicas with one device each.",
            "Start one process on each host: python train.py, without --tpu.",
        )
    if family.opened() and not runtime.is_spmd():
        raise NotReady(
            "Cannot use XLAPlugin(fsdp=True).",
            "A device was used before the Accelerator was created (by set_seed(), or for a tensor).",
            "Create the Accelerator first, or set ACCEL_XLA_FSDP=true for the script.",
        )
    family.use_all_devices()
    devices = runtime.global_runtime_device_count()
    return spmd.Mesh(np.arange(devices), (devices,), (_SHARD_AXIS,))


def _check_one_device(context: Context) -> None:
    if context.process.world_size > 1 and runtime.world_size() == 1:
        raise Conflict(
            f"Cannot train on {context.process.world_size} XLA processes, each on its own host.",
            "torch_xla started no replicas, so gradients would not be averaged.",
            "Pass XLAPlugin(fsdp=True), so that each process uses all its devices, or use `accel launch --tpu`.",
        )


def _downcast(context: Context) -> None:
    """Make torch_xla store float32 in bfloat16 and float64 in 32 bits."""
    family: Any = context.process.family
    if context.precision.name != "bf16":
        raise Conflict(
            f"Cannot combine downcast_bf16 and mixed_precision={context.precision.name!r}.",
            "Downcasting trains in bf16.",
            "Use mixed_precision='bf16', or remove downcast_bf16.",
        )
    if family.opened() and os.environ.get(_DOWNCAST_VARIABLE) != "1":
        raise NotReady(
            "Cannot use downcast_bf16.",
            "A device was used before the Accelerator was created (by set_seed(), or for a tensor).",
            f"Create the Accelerator first, or set {_DOWNCAST_VARIABLE}=1 for the script.",
        )
    publish({_DOWNCAST_VARIABLE: "1"})


# ---------------------------------------------------------------- sharding by SPMD
class _BatchSharding:
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


def _shard_model(model: Module, mesh: Any, blocks: Sequence[str]) -> Module:
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


# ---------------------------------------------------------------------- transfer of batches

# One call sends a batch, and a step's graph ends between batches. With DataLoader workers, threads of torch_xla's
# `MpDeviceLoader` read batches and send them ahead. Otherwise the training thread reads them, because reading may use
# this process's random-number generators, and their use by two threads would make runs irreproducible.

_Pair = tuple[Any, Any]

_CPU_DEVICE: Final = torch.device("cpu")


class _Opaque:
    """Data beside tensors that torch_xla must not inspect; it searches objects with a `__dict__` for tensors."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class _Failed:
    """An exception that a reading thread raised, passed to the loop."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class XLADeviceTransfer:
    """Sends batches to the device; an `accel_data.hooks.DeviceTransfer`.

    Args:
        device: the target device.
        prefetch: number of batches that `MpDeviceLoader` reads ahead, where allowed; 0: never use it.
        sharding: how torch_xla shards tensors among devices, or None.
    """

    def __init__(self, device: torch.device, prefetch: int, sharding: Any = None) -> None:
        self.device, self.prefetch, self.sharding = device, prefetch, sharding

    def __call__(self, pairs: Iterator[_Pair], ahead: bool) -> Iterator[_Pair]:
        return self._in_threads(pairs) if ahead and self.prefetch else self._one_by_one(pairs)

    def _one_by_one(self, pairs: Iterator[_Pair]) -> Iterator[_Pair]:
        for batch, rest in pairs:
            # The loop has finished the previous batch: its operations become one graph.
            torch_xla.sync()
            sent = xla_model.send_cpu_data_to_device(_tensors_of(batch), self.device, self.sharding)
            yield self._put_together(batch, sent), rest
        torch_xla.sync()

    def _in_threads(self, pairs: Iterator[_Pair]) -> Iterator[_Pair]:
        sizes = {"loader_prefetch_size": self.prefetch, "device_prefetch_size": self.prefetch}
        loader = MpDeviceLoader(_Reading(pairs), self.device, input_sharding=self.sharding, **sizes)
        try:
            for sent, travelling in iter(loader):
                if isinstance(travelling.content, _Failed):
                    raise travelling.content.error
                batch, rest = travelling.content
                yield self._put_together(batch, sent), rest
        finally:
            loader._parallel_loader.close()

    def _put_together(self, batch: Any, sent: list[Tensor]) -> Any:
        """The batch with its tensors replaced by the sent ones."""
        places = dict(zip(map(id, _tensors_of(batch)), sent, strict=True))
        moved = recursively_apply(lambda tensor: places.get(id(tensor), tensor), batch)
        return send_to_device(moved, self.device)


class _Reading:
    """An iterable for `MpDeviceLoader` that keeps exceptions of reading, which its thread would lose."""

    def __init__(self, pairs: Iterator[_Pair]) -> None:
        self._pairs = pairs

    def __iter__(self) -> Iterator[list[Any]]:
        try:
            for batch, rest in self._pairs:
                yield [_tensors_of(batch), _Opaque((batch, rest))]
        except Exception as error:
            yield [[], _Opaque(_Failed(error))]


def _tensors_of(batch: Any) -> list[Tensor]:
    """The CPU tensors of a batch, each once."""
    tensors: dict[int, Tensor] = {}

    def remember(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and tensor.device == _CPU_DEVICE:
            tensors[id(tensor)] = tensor
        return tensor

    recursively_apply(remember, batch)
    return list(tensors.values())
