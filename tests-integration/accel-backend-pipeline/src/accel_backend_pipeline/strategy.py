"""The strategy: stages along the axis `pp`, replicas of the pipeline along `dp_replicate`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Sequential
from torch.optim import Optimizer

from accel_backend_pipeline.config import PipelineConfig
from accel_backend_pipeline.stages import Pipeline
from accel_ops import gather_object
from accel_plugins import Axis, Bundle, Context, ObjectKind, Shards, Strategy
from accel_plugins.mesh import submesh
from accel_state.errors import NotOffered, SettingError

__all__ = ("PipelineStrategy",)


class PipelineStrategy(Strategy):
    """Each process trains some layers; checkpoints are those of one process."""

    config: PipelineConfig

    def __init__(self, context: Context, config: PipelineConfig) -> None:
        super().__init__(context, config)
        stages, replicas = (submesh(context.mesh, axis) for axis in ("pp", Axis.REPLICATE))
        if stages is None and replicas is not None:
            raise SettingError(
                "Cannot use the backend 'pipeline' with replicas only.",
                "No axis has stages.",
                'Give ParallelismConfig(axes={"pp": 2}) too.',
            )
        self._stages = None if stages is None else stages.get_group()
        self._replicas = None if replicas is None else replicas.get_group()
        self._groups: weakref.WeakKeyDictionary[Optimizer, list[list[Tensor]]] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        for model in bundle.models:
            if not isinstance(model, Sequential) or not callable(getattr(model, "loss", None)):
                raise NotOffered(
                    f"Cannot prepare {type(model).__name__} with the backend 'pipeline'.",
                    "It divides an nn.Sequential with a method `loss(outputs, targets)`.",
                    "Write the model so, or use another backend.",
                )

    def setup(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            for tensor in (*model.parameters(), *model.buffers()):
                self.context.process.transport.broadcast(tensor.detach(), 0).wait()
        bundle.models = [
            Pipeline(
                model,
                self._stages or dist.group.WORLD,  # type: ignore[arg-type]
                self.context.process.device,
                self.config.schedule,
                self.config.micro_batches,
                lambda: self.context.gradient.num_steps,
                self.context.precision.dtype,
            )
            for model in bundle.models
        ]
        own = {parameter for model in bundle.models for parameter in model.parameters()}
        for optimizer in bundle.optimizers:
            self._groups[optimizer] = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in own]
        return bundle

    def unwrap(self, model: Module) -> Module:
        return model.whole[0] if isinstance(model, Pipeline) else model

    def shards(self) -> Shards:
        return Shards(1, 0) if self.context.mesh is None else super().shards()

    # ------------------------------------------------------------------ one step

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        """Do nothing: forward computed the gradients."""

    @torch.no_grad()
    def finalize_gradients(self, optimizer: Optimizer) -> None:
        if self._replicas is not None:
            for gradient in _gradients(group["params"] for group in optimizer.param_groups):
                dist.all_reduce(gradient, group=self._replicas)
                gradient /= dist.get_world_size(self._replicas)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        listed = list(parameters)
        norm = torch.nn.utils.get_total_norm(_gradients([listed]), norm_type).to(self.context.process.device)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._stages)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._stages)
            norm = norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(listed, max_norm, norm)
        return norm

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

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        return self._of_all(model, dict(self.unwrap(model).state_dict()))

    def gradients(self, model: Module) -> dict[str, Tensor]:
        return self._of_all(model, super().gradients(model))

    def _of_all(self, model: Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that belong to the layers of any stage, in the order of the user's model."""
        bare = self.unwrap(model)
        if not isinstance(model, Pipeline):
            return dict(tensors)
        layers: Any = bare.named_children()
        own = {name for name, layer in layers if any(layer is one for one in model.layers)}
        gathered = self._gather({name: value for name, value in tensors.items() if name.split(".")[0] in own})
        found = {name: value for stage in gathered for name, value in stage.items()}
        return {name: found[name] for name in bare.state_dict() if name in found}

    def _gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = gather_object([value], group=self._stages)
        return gathered

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        if kind is not ObjectKind.OPTIMIZER or item not in self._groups:
            return super().collect(kind, item)
        with self._whole(item):
            state = item.state_dict()
        state["state"] = {index: one for stage in self._gather(state["state"]) for index, one in stage.items()}
        return state

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if kind is not ObjectKind.OPTIMIZER or item not in self._groups:
            super().load(kind, item, folder, index, **options)
            return
        with self._whole(item):
            super().load(kind, item, folder, index, **options)

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


def _gradients(parameters: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    return [one.grad for group in parameters for one in group if one.grad is not None]
