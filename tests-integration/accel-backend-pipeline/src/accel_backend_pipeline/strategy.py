"""The strategy: stages along the axis `pp`; `dp_replicate` and `tp` are optional."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Sequential
from torch.optim import Optimizer

from accel_backend_pipeline.config import PipelineConfig
from accel_backend_pipeline.stages import Pipeline, like, whole
from accel_ops import gather_object
from accel_plugins import Axis, Bundle, Context, ModelPart, ObjectKind, Shards, Strategy
from accel_plugins.checkpoint.parts import read_part
from accel_plugins.mesh import submesh
from accel_plugins.model_part import random_numbers_of_first
from accel_state.errors import NotOffered, SettingError

__all__ = ("PipelineStrategy",)


class PipelineStrategy(Strategy):
    """Each process trains some layers; checkpoints are those of one process."""

    config: PipelineConfig

    def __init__(self, context: Context, config: PipelineConfig) -> None:
        super().__init__(context, config)
        stages, replicas = (submesh(context.mesh, axis) for axis in ("pp", Axis.REPLICATE))
        if stages is None and context.mesh is not None:
            raise SettingError(
                "Cannot use the backend 'pipeline' without the axis 'pp'.",
                "No axis has stages.",
                'Give ParallelismConfig(axes={"pp": 2}) too.',
            )
        self._stages: Any = dist.group.WORLD if stages is None else stages.get_group()
        self._replicas = None if replicas is None else replicas.get_group()
        rank, size = dist.get_rank(self._stages), dist.get_world_size(self._stages)
        own = [rank, rank + size] if config.schedule == "interleaved" else [rank]
        self._part = ModelPart(own, size * len(own))
        self._groups: weakref.WeakKeyDictionary[Optimizer, list[list[Tensor]]] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        for model in bundle.models:
            divisible = isinstance(model, Sequential) and len(model) >= self._part.count
            if not divisible or not callable(getattr(model, "loss", None)):
                raise NotOffered(
                    f"Cannot prepare {type(model).__name__} with the backend 'pipeline'.",
                    f"It divides an nn.Sequential of at least {self._part.count} layers with `loss(outputs, targets)`.",
                    "Write the model so, or use another backend.",
                )

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[ModelPart]:
        with random_numbers_of_first(), super().init_module(empty_init):
            yield ModelPart(self._part.stages, self._part.count)

    def place(self, model: Module) -> Module:
        for layer in model.children():
            if not any(parameter.is_meta for parameter in layer.parameters()):
                super().place(layer)
        return model

    def setup(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            self._send_from_first(model)
        bundle.models = [
            Pipeline(model, self._part, self._stages, self.config, self.context) for model in bundle.models
        ]
        own = {parameter for model in bundle.models for parameter in model.parameters()}
        for optimizer in bundle.optimizers:
            self._groups[optimizer] = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in own]
        return bundle

    def _send_from_first(self, model: Module) -> None:
        """Broadcast the weights of the first process, or of the first that built the same layers."""
        in_parts = any(parameter.is_meta for parameter in model.parameters())
        for tensor in (*model.parameters(), *model.buffers()):
            divided = isinstance(tensor, DTensor)
            group = self._replicas if in_parts else self._stages if divided else dist.group.WORLD
            if group is not None and not tensor.is_meta:
                local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                dist.broadcast(local.detach(), group=group, group_src=0)

    def unwrap(self, model: Module) -> Module:
        return model.user_model[0] if isinstance(model, Pipeline) else model

    def shards(self) -> Shards:
        return Shards(1, 0) if self.context.mesh is None else super().shards()

    # ------------------------------------------------------------------ one step

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        """Do nothing: forward computed the gradients."""

    @torch.no_grad()
    def finalize_gradients(self, optimizer: Optimizer) -> None:
        if self._replicas is not None:
            for gradient in _gradients(one for group in optimizer.param_groups for one in group["params"]):
                dist.all_reduce(gradient, group=self._replicas)
                gradient /= dist.get_world_size(self._replicas)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        listed = list(parameters)
        norms = [whole(torch.linalg.vector_norm(gradient, norm_type)) for gradient in _gradients(listed)]
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack([torch.zeros((), device=self.context.process.device), *norms]), norm_type
        )
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._stages)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._stages)
            norm = norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(listed, max_norm, norm, foreach=False)
        return norm

    def clip_value(self, parameters: Iterable[Tensor], value: float) -> None:
        torch.nn.utils.clip_grad_value_(parameters, value, foreach=False)

    def step(self, optimizer: Optimizer, closure: Any = None) -> bool:
        if closure is not None:
            raise NotOffered(
                "Cannot call optimizer.step(closure) with the backend 'pipeline'.",
                "Forward computes the gradients of a whole batch.",
                "Call step() without a closure.",
            )
        optimizer.step()
        return True

    # ------------------------------------------------------------------ the parts of all stages

    def _of_all(self, own: Mapping[Any, Any]) -> dict[Any, Any]:
        """The items of all stages."""
        return {key: value for stage in gather_object([dict(own)], group=self._stages) for key, value in stage.items()}

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        return self._of_all({name: whole(value) for name, value in model.state_dict().items()})

    def gradients(self, model: Module) -> dict[str, Tensor]:
        return self._of_all(super().gradients(model))

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        model.load_state_dict(weights, strict=strict)

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        if kind is not ObjectKind.OPTIMIZER or item not in self._groups:
            return super().collect(kind, item)
        with self._whole(item):
            state = item.state_dict()
        own = {number: {key: whole(value) for key, value in one.items()} for number, one in state["state"].items()}
        return {**state, "state": self._of_all(own)}

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if kind is not ObjectKind.OPTIMIZER or item not in self._groups:
            read_part(kind, item, folder, index, **options)
            return
        with self._whole(item):
            read_part(kind, item, folder, index, **options)
        for parameter, state in item.state.items():
            state.update({key: like(value, parameter) for key, value in state.items()})

    @contextmanager
    def _whole(self, optimizer: Optimizer) -> Iterator[None]:
        """A block in which an optimizer has the parameters of all stages, as it has in one process."""
        own = [group["params"] for group in optimizer.param_groups]
        for group, parameters in zip(optimizer.param_groups, self._groups[optimizer], strict=True):
            group["params"] = parameters
        try:
            yield
        finally:
            # Loading replaces the groups.
            for group, parameters in zip(optimizer.param_groups, own, strict=True):
                group["params"] = parameters
            kept = {parameter for parameters in own for parameter in parameters}
            for parameter in [one for one in optimizer.state if one not in kept]:
                del optimizer.state[parameter]

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            self._groups.pop(optimizer, None)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [one.grad for one in parameters if one.grad is not None]
