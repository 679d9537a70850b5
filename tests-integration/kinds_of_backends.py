"""Two kinds of backends as an outside author writes them: an optimizer whose state is spread, and an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_ops.objects import gather_object
from accel_plugins import Bundle, Capabilities, Context, Manifest, ObjectKind, Strategy
from accel_plugins.manifest import ENGINE_CAPABILITIES
from accel_plugins.precision.base import Closure
from accel_state.errors import CheckpointError, Conflict, NotOffered
from accel_state.kwargs import KwargsHandler

__all__ = ("ENGINE", "SPREAD", "EngineConfig", "EngineStrategy", "SpreadOptimizerStrategy")

SPREAD: Final = Manifest(
    name="spread-optimizer",
    strategy=f"{__name__}:SpreadOptimizerStrategy",
    capabilities=Capabilities(join=False, unused_parameters=False),
    protocol=3,
)

ENGINE: Final = Manifest(
    name="engine-that-clips",
    strategy=f"{__name__}:EngineStrategy",
    config=f"{__name__}:EngineConfig",
    capabilities=ENGINE_CAPABILITIES._replace(fp16=False),
    together=frozenset({ObjectKind.MODEL, ObjectKind.OPTIMIZER}),
    protocol=3,
)


class Replicas(Strategy):
    """Processes with equal models, whose gradients are averaged when they are finalised."""

    def setup(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            self.share((*model.parameters(), *model.buffers()))
        return bundle

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor], root: int = 0) -> None:
        """Give the tensors on every process the values of one process."""
        for tensor in tensors:
            self.context.process.transport.broadcast(tensor.detach(), root).wait()

    @torch.no_grad()
    def finalize_gradients(self, optimizer: Optimizer) -> None:
        self.average(one.grad for one in _parameters(optimizer) if one.grad is not None)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over the processes."""
        for tensor in tensors:
            self.context.process.transport.all_reduce(tensor.detach()).wait()
            tensor.detach().div_(self.context.process.world_size)

    def average_parameters(self, model: Module) -> None:
        self.average(self.unwrap(model).parameters())


class SpreadOptimizerStrategy(Replicas):
    """Each process steps every n-th parameter, and has only the optimizer's state of those (ZeRO 1)."""

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        if closure is not None:
            raise NotOffered(
                "Cannot call optimizer.step(closure) with a spread optimizer.",
                "Each process steps only some parameters.",
                "Call step() without a closure.",
            )
        # The scaler looks at all gradients before some are taken away.
        self.context.precision.unscale(optimizer)
        parameters = _parameters(optimizer)
        foreign = [(one, one.grad) for index, one in enumerate(parameters) if self.owner(index) != self.rank]
        for parameter, _ in foreign:
            parameter.grad = None
        stepped = super().step(optimizer)
        for parameter, gradient in foreign:
            parameter.grad = gradient
        for index, parameter in enumerate(parameters):
            self.share([parameter], self.owner(index))
        return stepped

    @property
    def rank(self) -> int:
        return self.context.process.rank

    def owner(self, index: int) -> int:
        """The process that steps a parameter."""
        return index % self.context.process.world_size

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        state = super().collect(kind, item)
        if kind is ObjectKind.OPTIMIZER:
            everyones = gather_object([state["state"]])
            state["state"] = {
                index: everyones[self.owner(index)][index]
                for index in range(len(_parameters(item)))
                if index in everyones[self.owner(index)]
            }
        return state


@dataclass
class EngineConfig(KwargsHandler):
    """Settings of the engine; without clipping, the norm is 0."""

    gradient_clipping: float = 0.0


class Engine(Module):
    """Computes in the precision of the run, and averages, clips and steps at once."""

    def __init__(self, module: Module, optimizer: Optimizer, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype
        self.optimizer = [optimizer]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            outputs: Tensor = self.module(*args, **kwargs)
        return outputs.float()


class EngineStrategy(Replicas):
    """An engine that owns the step, as DeepSpeed does: it accumulates, casts, and clips when it steps."""

    config: EngineConfig

    def __init__(self, context: Context, config: EngineConfig) -> None:
        super().__init__(context, config)
        if context.precision.name not in ("no", "bf16"):
            raise Conflict(
                "Cannot use this precision.", "The engine casts to bf16 only.", "Use mixed_precision='bf16'."
            )

    def setup(self, bundle: Bundle) -> Bundle:
        bundle = super().setup(bundle)
        dtype = self.context.precision.dtype
        if bundle.optimizers:
            bundle.models = [
                Engine(model, optimizer, dtype)
                for model, optimizer in zip(bundle.models, bundle.optimizers, strict=True)
            ]
        return bundle

    def unwrap(self, model: Module) -> Module:
        return model.module if isinstance(model, Engine) else model

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        (loss / self.context.gradient.num_steps).backward(**kwargs)  # type: ignore[no-untyped-call]

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> None:
        if (max_norm, norm_type) != (self.config.gradient_clipping, 2.0):
            raise Conflict(
                f"Cannot clip to the norm {max_norm} with an engine that clips to {self.config.gradient_clipping}.",
                "It clips when it steps, by its settings.",
                "Set gradient_clipping in its settings.",
            )

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        if closure is not None:
            raise NotOffered(
                "Cannot call optimizer.step(closure) with this engine.", "It steps once.", "Call step() without one."
            )
        if self.config.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(_parameters(optimizer), self.config.gradient_clipping)
        optimizer.step()
        return True

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        return super().collect(kind, item) if kind is ObjectKind.SCHEDULER else item

    def save(self, kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        if isinstance(state, Engine):
            content = {"model": state.module.state_dict(), "optimizer": state.optimizer[0].state_dict()}
            if self.context.process.rank == 0:
                torch.save(content, _file(folder, index))
        elif not isinstance(state, Optimizer) and self.context.process.rank == 0:
            super().save(kind, state, folder, index, safe_serialization=safe_serialization)

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if isinstance(item, (Engine, Optimizer)) and not _file(folder, index).is_file():
            raise CheckpointError(
                f"Cannot load an engine from {folder}.", f"{_file(folder, index).name} is not there.", "Save it first."
            )
        if isinstance(item, Engine):
            content: Mapping[str, Any] = torch.load(_file(folder, index))
            item.module.load_state_dict(content["model"], strict=options.get("strict", True))
            if options.get("strict", True):
                item.optimizer[0].load_state_dict(content["optimizer"])
        elif not isinstance(item, Optimizer):
            super().load(kind, item, folder, index, **options)


def _file(folder: Path, index: int) -> Path:
    return folder / f"engine_{index}.pt"


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
