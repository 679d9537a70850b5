"""The sharding strategy with `torch.distributed.fsdp.fully_shard`.

Each block's parameters are gathered for its forward and backward and then freed; gradients and optimizer state exist
only in shards. A model keeps its class and parameter names; parameters become DTensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.nn import Module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from accel_plugins.arrived_models import ArrivedGradients, ArrivedLayout, arrived_layout, parameter_groups
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.fsdp import weights
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.sharded import ShardedStrategy
from accel_plugins.fsdp.sharding import (
    build_in_shards,
    ignored_parameters,
    is_built_in_shards,
    materialise,
    offload,
    shard_groups,
)
from accel_plugins.manifest import Axis
from accel_plugins.mesh import SHARDING_AXES, flattened, submesh
from accel_plugins.model_part import ModelPart
from accel_plugins.parameters import find_tied_parameters
from accel_plugins.shards import Shards
from accel_plugins.strategy import clip_to_norm
from accel_state.errors import Conflict, NotOffered

__all__ = ("FSDP2Strategy", "apply_fully_shard")


def apply_fully_shard(
    model: Module, config: FullyShardedDataParallelPlugin, mesh: DeviceMesh | None, pins_memory: bool
) -> None:
    """Shard each block of a model, and all other parameters, over a mesh; None: that of all processes."""
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": bool(config.reshard_after_forward),
        "mp_policy": config.mixed_precision_policy or fsdp.MixedPrecisionPolicy(),
        "offload_policy": offload(config.cpu_offload, pins_memory),
        "ignored_params": ignored_parameters(model, config.ignored_modules) or None,
    }
    for block in (*shard_groups(model, config.policy_for(model)), model):
        fsdp.fully_shard(block, **arguments)


class FSDP2Strategy(ShardedStrategy):
    """Shards each parameter separately; `sharder`, if set, shards a model by a program's function, or returns None."""

    version: ClassVar[int] = 2
    sharder: ClassVar[Callable[[Module], Module | None] | None] = None

    def __init__(self, context: Context, config: FullyShardedDataParallelPlugin) -> None:
        super().__init__(context, config)
        self._full_weights: dict[int, dict[str, Tensor]] = {}
        self._arrived: weakref.WeakKeyDictionary[Module, _Arrived] = weakref.WeakKeyDictionary()

    def check(self, bundle: Bundle) -> None:
        super().check(bundle)
        process = self.context.process
        for model in bundle.models:
            if not self.arrives_sharded(model) or model in self._sharded:
                continue
            layout = arrived_layout(model, process)
            if any(layout.batch_shard != other.layout.batch_shard for other in self._arrived.values()):
                raise Conflict(
                    f"Cannot prepare {type(model).__name__}.",
                    f"By its meshes the data has {layout.batch_shard.count} shards, of which this process reads number "
                    f"{layout.batch_shard.index}; another model has {self.shards()}.",
                    "Shard all models of a run over the same axes.",
                )
            self._arrived[model] = _Arrived(layout)

    def shards(self) -> Shards:
        for arrived in self._arrived.values():
            return arrived.layout.batch_shard
        return super().shards()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[ModelPart]:
        """Models are built in shards; with tensor parallelism, only `prepare` shards them."""
        if self._mesh is None or submesh(self.context.mesh, Axis.TENSOR) is not None:
            return super().init_module(empty_init)
        return build_in_shards(self._mesh, empty=bool(empty_init))

    def place(self, model: Module) -> Module:
        if self.arrives_sharded(model):
            return model
        if is_built_in_shards(model):
            return weights.place_values(model, self.context.process.device)
        if self.config.cpu_ram_efficient_loading:
            # Transforms shard weights, and only full ones can be broadcast.
            self._full_weights[id(model)] = weights.weights_of_first(model, self.context.process.rank)
        return super().place(model)

    def setup(self, bundle: Bundle) -> Bundle:
        """Shard each model that is not sharded yet, and give the optimizers the sharded parameters."""
        process = self.context.process
        names = bundle.parameter_names()
        ties = [find_tied_parameters(model) for model in bundle.models]
        for number, model in enumerate(bundle.models):
            if not self.arrives_sharded(model):
                if self.context.precision.dtype is not None:
                    weights.train_in_fp32(model)
                ignored = self.names_of_ignored(model)
                by_program = self._shard_by_program(model)
                bundle.models[number] = self.shard_whole(model) if by_program is None else by_program
                self.average_ignored(bundle.models[number], ignored)
            elif model in self._arrived and model not in self.unreduced:
                # Its parts that are not sharded, whose gradients it does not reduce itself.
                layout = self._arrived[model].layout
                self.unreduced[model] = ArrivedGradients(model, layout, process, self.reduces_of(model))
            if isinstance(bundle.models[number], FSDPModule):
                # torch makes this class, whose own method refuses in a way that names no remedy.
                type(bundle.models[number]).__deepcopy__ = _refuse_copy
        bundle.rebind_by_name(names)
        self.record(bundle, ties)
        return bundle

    def shard_whole(self, model: Module) -> Module:
        """Shard a model that is not sharded yet by the settings of this strategy."""
        config, process, mesh = self.config, self.context.process, self._mesh
        pins = process.family.spec.pins_memory
        if mesh is not None and is_built_in_shards(model):
            offloads = isinstance(offload(config.cpu_offload, pins), fsdp.CPUOffloadPolicy)
            device = torch.device("cpu") if offloads else process.device
            materialise(model, mesh, device, lambda: apply_fully_shard(model, config, mesh, pins))
            return model
        full = self._full_weights.pop(id(model), None)
        if not config.cpu_ram_efficient_loading:
            weights.send_from_first(model, process.device, self.context.mesh)
        elif full is None:
            full = weights.weights_of_first(model, process.rank)
        if mesh is not None:
            apply_fully_shard(model, config, mesh, pins)
        if full is not None:
            weights.distribute(model, full)
        return model

    def _shard_by_program(self, model: Module) -> Module | None:
        """The model that the program's own function has sharded; None if it has none, or leaves it to the strategy."""
        sharder = type(self).sharder
        if sharder is None or is_built_in_shards(model):
            return None
        sharded = sharder(model)
        if sharded is not None:
            self._full_weights.pop(id(model), None)
        return sharded

    @functools.cached_property
    def _mesh(self) -> DeviceMesh | None:
        """The mesh that replicates and shards parameters; None when no axis shards them."""
        whole, process = self.context.mesh, self.context.process
        if whole is None:
            return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=(Axis.SHARD.value,))
        sharding = flattened(whole, SHARDING_AXES)
        if sharding is None or submesh(whole, Axis.REPLICATE) is None:
            return sharding
        names = (Axis.REPLICATE.value, *(sharding.mesh_dim_names or ()))
        return whole[names]

    # ------------------------------------------------------------------ one step

    def reduces_gradients(self, model: Module) -> bool:
        if model in self._arrived:
            return self._arrived[model].reduces
        # torch has no public function that reads what `set_requires_gradient_sync` has set.
        sharded = (module for module in model.modules() if isinstance(module, FSDPModule))
        return next((bool(group.reduce_grads) for module in sharded for group in parameter_groups(module)), True)

    def reduce_gradients(self, model: Module, reduces: bool) -> None:
        if model in self._arrived:
            self._arrived[model].reduces = reduces
        # Of a model that arrived so, perhaps only blocks are sharded.
        for module in model.modules() if model in self._arrived else [model]:
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(reduces)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        groups = _alike(parameters)
        total = _total_norm(groups, norm_type)
        for group in groups:
            clip_grads_with_norm_(group, max_norm, total)
        return total

    def norm_with_sums(
        self, parameters: Sequence[Tensor], sums: Tensor | None, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Tensor | None:
        """The sums travel with the norm, if one reduction over all processes makes it."""
        total: Tensor
        groups = _alike(parameters)
        sharded = _shards_over_all(groups, self.context.process.world_size)
        if sums is not None and sharded and norm_type != float("inf"):
            norms: Any = torch._foreach_norm(sharded, norm_type)  # pyright: ignore[reportPrivateImportUsage]
            # In the order of torch, so that a guarded run equals another one bit for bit.
            together = torch.cat([torch.stack(norms).float() ** norm_type, sums])
            self.context.process.transport.all_reduce(together).wait()
            total = torch.linalg.vector_norm(together[: len(sharded)] ** (1.0 / norm_type), norm_type)
            sums.copy_(together[len(sharded) :])
            sums[-1] = total * self.context.process.world_size
        else:
            total = _total_norm(groups, norm_type)
            if sums is not None:
                sums[-1] = total
                self.context.process.transport.all_reduce(sums).wait()
        if max_norm is not None:
            for group in groups:
                clip_to_norm(group, max_norm, total)
        return total

    def clip_value(self, parameters: Iterable[Tensor], value: float) -> None:
        listed = list(parameters)
        for parameter in listed:
            _reduce_partial(parameter)
        for group in _alike(listed):
            torch.nn.utils.clip_grad_value_(group, value)


@dataclass
class _Arrived:
    """A model that arrived distributed: how the processes share it, and whether backward reduces its gradients now."""

    layout: ArrivedLayout
    reduces: bool = True


def _refuse_copy(model: Module, memo: object) -> Module:
    """The `__deepcopy__` of a sharded model, which averages such as torch's `AveragedModel` call."""
    raise NotOffered(
        f"Cannot copy {type(model).__name__}.",
        "It is sharded by fully_shard, whose communication cannot be copied with the weights.",
        "For a moving average use accel_torch.ModelAverage(model); for the weights, accelerator.get_state_dict(model).",
    )


def _reduce_partial(parameter: Tensor) -> None:
    """Sum a gradient that is a partial sum on each process, as of norms under sequence parallelism.

    A norm or a step sums it by itself; clamping cannot, because it is not linear.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        assert isinstance(parameter, DTensor)
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters with a gradient, grouped by mesh, because torch's functions support only one mesh per call."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            groups.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _total_norm(groups: list[list[Tensor]], norm_type: float) -> Tensor:
    norms = [_norm(group, norm_type) for group in groups]
    # Unsharded parameters remain on the device when the others are offloaded.
    together = [norm.to(norms[0].device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(together), norm_type) if together else torch.zeros(())


def _shards_over_all(groups: list[list[Tensor]], processes: int) -> list[Tensor]:
    """The shards of the gradients, if each gradient is divided over all processes by one dimension; else nothing."""
    gradients = [parameter.grad for group in groups for parameter in group]
    divided = [
        gradient.to_local()
        for gradient in gradients
        if isinstance(gradient, DTensor)
        and gradient.device_mesh.size() == processes
        and [placement.is_shard() for placement in gradient.placements] == [True]
    ]
    return divided if len(divided) == len(gradients) else []


def _norm(parameters: list[Tensor], norm_type: float) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    on_host = any(gradient.device.type != gradient.device_mesh.device_type for gradient in sharded)
    # torch has no maximum of an empty tensor, and the shard of a small parameter may be empty.
    if sharded and (on_host or norm_type == float("inf")):
        return _norm_of_shards(sharded, norm_type)
    norm = get_total_norm(gradients, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _norm_of_shards(gradients: list[DTensor], norm_type: float) -> Tensor:
    """The norm of shards, some of which may be empty or in host memory; groups of a mesh may support only devices."""
    mesh = gradients[0].device_mesh
    norms: dict[tuple[Placement, ...], list[Tensor]] = {}
    for gradient in gradients:
        local = norms.setdefault(gradient.placements, [])
        shard = gradient.to_local()
        if shard.numel():
            local.append(torch.linalg.vector_norm(shard, norm_type))
    totals = []
    for placements, local in norms.items():
        mine = torch.linalg.vector_norm(torch.stack(local), norm_type) if local else torch.zeros(())
        total = mine.to(mesh.device_type)
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate():
                total = _norm_over(total, norm_type, mesh.get_group(dimension))
        totals.append(total)
    together: Tensor = torch.linalg.vector_norm(torch.stack(totals), norm_type)
    return together


def _norm_over(norm: Tensor, norm_type: float, group: Any) -> Tensor:
    """The norm of all shards of a group, computed from that of this process's shards."""
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    powers = torch.pow(norm, norm_type)
    dist.all_reduce(powers, group=group)
    return torch.pow(powers, 1.0 / norm_type)
