"""The strategy on XLA devices: each step is traced into one compiled graph, which ends after the optimizer step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch_xla
import torch_xla.core.xla_model as xla_model
import torch_xla.runtime as runtime
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_ops.tree import recursively_apply
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.manifest import ObjectKind
from accel_plugins.precision.base import Closure
from accel_plugins.strategy import Strategy
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_plugins.xla import spmd
from accel_plugins.xla.config import XLAPlugin
from accel_plugins.xla.device_transfer import XLADeviceTransfer
from accel_state.errors import Conflict, NotOffered, NotReady
from accel_state.settings.environ import publish

__all__ = (
    "XLAStrategy",
    "move_state",
)

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
            bundle.models[:] = [spmd.shard_model(model, self._mesh, self.config.blocks) for model in bundle.models]
        for optimizer in bundle.optimizers:
            move_state(optimizer)
            self._shard_state(optimizer)
        torch_xla.sync()
        return bundle

    def _make_equal(self, model: Module) -> None:
        """Broadcast the weights of the first process."""
        if self.context.process.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                self.context.process.transport.broadcast(tensor.detach(), 0).wait()

    def unwrap(self, model: Module) -> Module:
        inner = spmd.unwrapped(model)
        return model if inner is None else inner

    def wrap_loader(self, loader: Any) -> Any:
        """The loader with torch_xla's transfer to the device, unless device placement is off."""
        if getattr(loader, "device", None) is not None:
            sharding = None if self._mesh is None else spmd.BatchSharding(self._mesh)
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
        if self._mesh is not None:
            spmd.shard_parameters(self.unwrap(model), self._mesh)
        torch_xla.sync()

    def _shard_state(self, optimizer: Optimizer) -> None:
        if self._mesh is not None:
            spmd.shard_state(optimizer, self._mesh)


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
    return spmd.mesh_of_all_devices()


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


def move_state(optimizer: Optimizer) -> None:
    """Move the state of an optimizer that has stepped to the device of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
