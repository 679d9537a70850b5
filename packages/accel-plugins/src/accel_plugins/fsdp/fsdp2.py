"""The sharding strategy over `torch.distributed.fsdp.fully_shard`.

Each block's parameters are gathered for its forward and backward and freed again; gradients and optimizer state exist
in shards only. A model keeps its class and the names of its parameters, which become DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from accel_plugins.blocks import repeated_blocks
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.fsdp import loading, weights
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.policies import blocks_to_shard, ignored_parameters, mixed_precision, offload
from accel_plugins.manifest import Axis, Part
from accel_plugins.mesh_axes import flattened, part
from accel_plugins.strategy import Strategy
from accel_plugins.transform import Transform
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_state.errors import Conflict, NotOffered

__all__ = ("FSDP2Strategy",)

_DIVIDING = (Axis.SHARD, Axis.CONTEXT, Axis.SEQUENCE)


class FSDP2Strategy(Strategy):
    """Shards parameters, gradients and optimizer state over the processes."""

    saves_together: ClassVar[bool] = True
    saves_behind: ClassVar[bool] = True
    gives_partial_gradients: ClassVar[bool] = False
    config: FullyShardedDataParallelPlugin

    def __init__(self, context: Context, config: FullyShardedDataParallelPlugin) -> None:
        super().__init__(context, config)
        if config.fsdp_version != 2:
            raise Conflict(
                f"The backend 'fsdp2' was asked for with settings of FSDP version {config.fsdp_version}.",
                "It shards by version 2.",
                "Use fsdp_version=2 (or FSDP_VERSION=2), or the backend 'fsdp1'.",
            )
        self._owners: dict[int, Module] = {}
        self._saving_group: torch.distributed.ProcessGroup | None = None
        self._holding: dict[int, int] = {}
        self._sources: dict[int, dict[str, Tensor]] = {}

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        if self.context.process.backend is None:
            raise Conflict(
                "Sharding (FSDP) was asked for.",
                "This process was started alone, so there is nobody to share with.",
                "Start the script with `accel launch --num_processes N`.",
            )
        for model in bundle.models:
            blocks_to_shard(model, self.config)
            loading.check(model, self.config, self.context.process.rank)
            if self.context.precision.scaler is not None and self._whole(model):
                raise NotOffered(
                    "Parameters were to be trained in fp16 without being sharded (ignored_modules).",
                    "torch's gradient scaler cannot unscale sharded gradients and whole ones together.",
                    "Train in bf16, or freeze the ignored modules.",
                )
        for optimizer in bundle.optimizers:
            _owner(optimizer, bundle.models)
            if optimizer.state:
                raise Conflict(
                    f"{type(optimizer).__name__} was given to prepare().",
                    "It has stepped before, and its state belongs to parameters that are not sharded yet.",
                    "Prepare it first, and load its state afterwards.",
                )

    def transforms(self) -> Iterable[Transform]:
        config = self.config
        if not (config.activation_checkpointing or config.activation_checkpointing_offload):
            return ()
        offload = bool(config.activation_checkpointing_offload)
        return (ActivationCheckpoint(lambda model: blocks_to_shard(model, config) or repeated_blocks(model), offload),)

    def place(self, model: Module) -> Module:
        if self.config.cpu_ram_efficient_loading:
            # Transforms divide weights, and only whole ones can be sent.
            self._sources[id(model)] = loading.weights_of_first(model, self.context.process.rank)
        loading.to_device(model, self.context.process.device)
        return model

    def setup(self, bundle: Bundle) -> Bundle:
        before = bundle.parameter_names()
        for model in bundle.models:
            self._shard(model)
        bundle.rebind_by_name(before)
        for optimizer in bundle.optimizers:
            self._owners[id(optimizer)] = _owner(optimizer, bundle.models)
        return bundle

    def _shard(self, model: Module) -> None:
        config, context = self.config, self.context
        source = self._source(model) if config.cpu_ram_efficient_loading else None
        mesh = self._mesh
        for parameter in self._whole(model) if mesh is not None else ():
            hook = self._averaging_hook(model)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if mesh is not None:
            arguments: dict[str, Any] = {
                "mesh": mesh,
                "reshard_after_forward": bool(config.reshard_after_forward),
                "mp_policy": mixed_precision(config, context.precision.dtype),
                "offload_policy": offload(config, context.process.family.pins_memory),
                "ignored_params": ignored_parameters(model, config) or None,
            }
            for block in (*blocks_to_shard(model, config), model):
                fully_shard(block, **arguments)
        if source is not None:
            loading.distribute(model, source)

    def _source(self, model: Module) -> dict[str, Tensor]:
        """All weights, where this is the first process; kept from before they were divided."""
        kept = self._sources.pop(id(model), None)
        return loading.weights_of_first(model, self.context.process.rank) if kept is None else kept

    def _whole(self, model: Module) -> list[Parameter]:
        """Parameters that train and are not sharded."""
        return [parameter for parameter in ignored_parameters(model, self.config) if parameter.requires_grad]

    def _averaging_hook(self, model: Module) -> Callable[[Tensor], None]:
        """Averages the gradient of a parameter that is not sharded, when gradients are synchronised.

        What earlier backwards have averaged is the same everywhere, so averaging it again changes nothing.
        """
        transport, holding, key = self.context.process.transport, self._holding, id(model)

        def average(parameter: Tensor) -> None:
            if not holding.get(key) and parameter.grad is not None:
                transport.all_reduce(parameter.grad).wait()
                parameter.grad /= transport.world_size

        return average

    @functools.cached_property
    def _mesh(self) -> DeviceMesh | None:
        """The mesh that parameters are divided over, behind that of their copies; None when no axis divides them."""
        whole, process = self.context.mesh, self.context.process
        if whole is None:
            return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=(Axis.SHARD.value,))
        dividing = flattened(whole, _DIVIDING)
        if dividing is None or part(whole, Axis.REPLICATE) is None:
            return dividing
        names = (Axis.REPLICATE.value, *(dividing.mesh_dim_names or ()))
        return whole[names]

    # ------------------------------------------------------------------ one step

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        return _Syncing(self._holding, model, held=True) if isinstance(model, FSDPModule) else super().no_sync(model)

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        if isinstance(model, FSDPModule):
            return _Syncing(self._holding, model, held=False)
        return super().sync_in_next_backward(model)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        groups = _alike(parameters)
        norms = [_norm(group, norm_type) for group in groups]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
        for group in groups:
            clip_grads_with_norm_(group, max_norm, total)
        return total

    def clip_value(self, parameters: Iterable[Tensor], value: float) -> None:
        for group in _alike(parameters):
            torch.nn.utils.clip_grad_value_(group, value)

    def average_parameters(self, model: Module) -> None:
        raise NotOffered(
            "Parameters were to be averaged over the processes (LocalSGD).",
            "With FSDP each process has another part of them, so there is nothing to average.",
            "Use the backend 'ddp' with LocalSGD.",
        )

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        raise NotOffered(
            "Processes were to run out of batches at different times (join_uneven_inputs).",
            "With FSDP every forward gathers parameters from all processes.",
            "Use even_batches=True, or the backend 'ddp'.",
        )

    # ------------------------------------------------------------------ checkpoints

    @property
    def _full(self) -> bool:
        return bool(self.config.state_dict_type == "FULL_STATE_DICT")

    def collect(self, part: Part, item: Any) -> Any:
        if self._saving_group is None and not self._full:
            self._saving_group = torch.distributed.new_group(backend="gloo")
        if part is Part.MODEL:
            return weights.model_state(item, full=self._full)
        if part is Part.OPTIMIZER:
            inner = _inner(item)
            return weights.optimizer_state(self._owners[id(inner)], inner, full=self._full)
        return super().collect(part, item)

    def save(self, part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        if part in (Part.MODEL, Part.OPTIMIZER):
            first, group = self.context.process.rank == 0, self._saving_group
            weights.write(part, state, folder, index, full=self._full, first=first, group=group)
        elif self.context.process.rank == 0:
            super().save(part, state, folder, index, safe_serialization=safe_serialization)

    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        if part is Part.MODEL:
            weights.load_model(item, folder, index, strict=options.get("strict", True))
        elif part is Part.OPTIMIZER:
            inner = _inner(item)
            weights.load_optimizer(self._owners[id(inner)], inner, folder, index)
        else:
            super().load(part, item, folder, index, **options)

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        return weights.model_state(model, full=True)

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        loading.put(model, weights, strict=strict)

    def writes_weights(self) -> bool:
        return self.context.process.rank == 0


def _alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters with a gradient, in groups that torch's functions can handle together: by the mesh they lie on."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            groups.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _norm(parameters: list[Tensor], norm_type: float) -> Tensor:
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _inner(optimizer: Any) -> Optimizer:
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _owner(optimizer: Optimizer, models: Sequence[Module]) -> Module:
    """The model whose parameters an optimizer holds.

    Raises:
        Conflict: it holds parameters of several models, or of none that are prepared with it.
    """
    held: set[Parameter] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if held <= set(model.parameters()):
            return model
    raise Conflict(
        f"{type(optimizer).__name__} was given to prepare().",
        "Its parameters are not those of one model of the same call, and sharding replaces parameters.",
        "Give each optimizer together with its model, and make one optimizer for each model.",
    )


class _Syncing:
    """Backward reduces gradients, or leaves them where they are, for a while; may be nested."""

    __slots__ = ("_held", "_holding", "_model")

    def __init__(self, holding: dict[int, int], model: FSDPModule, held: bool) -> None:
        self._holding, self._model, self._held = holding, model, held

    def __enter__(self) -> None:
        depth = self._holding.get(id(self._model), 0)
        self._holding[id(self._model)] = depth + self._held
        self._model.set_requires_gradient_sync(not self._held)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        depth = self._holding.get(id(self._model), 0) - self._held
        self._holding[id(self._model)] = depth
        self._model.set_requires_gradient_sync(depth == 0)
