"""DiLoCo with one planted fault each, for the test kit to find.

`DiLoCo` works: each process trains on its own for `period` steps; then the mean of the weights makes one step of an
outer optimizer (Nesterov) from the weights after the last such step, the anchor. Every other strategy is `DiLoCo` with
a single fault.

    entry = CATALOGUE["wrong_sign"]
    entry.target      "catalogues.local_step_backends:wrong_sign", which leads to its Manifest
    entry.truth       what is wrong
    entry.where       the method that is wrong
    entry.finding     what a detector has to report
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.manifest import Capabilities, Manifest, ObjectKind
from accel_plugins.strategy import Strategy
from accel_state.kwargs import KwargsHandler
from catalogues.faulty_backend import Faults

__all__ = ("CATALOGUE", "DiLoCo", "DiLoCoConfig")

CATALOGUE: Final = Faults(
    config=f"{__name__}:DiLoCoConfig",
    capabilities=Capabilities(join=False, average_parameters=False, equal_replicas=False, collective_save=True),
)
"""By name, fifteen backends with a fault; `CATALOGUE.control` has none."""


def __getattr__(name: str) -> Manifest:
    return CATALOGUE.manifest(name)


@dataclass
class DiLoCoConfig(KwargsHandler):
    """Settings of the outer optimizer.

    With `outer_rate=1` and `outer_momentum=0`, the outer step replaces the weights by their mean.
    """

    period: int = 4
    outer_rate: float = 0.7
    outer_momentum: float = 0.9


class Outer:
    """What the outer optimizer keeps for one parameter.

    Args:
        weights: the first anchor.

    Attributes:
        anchor: the weights after the last outer step.
        momentum: the outer momentum.
        steps: inner steps so far.
    """

    def __init__(self, weights: Tensor) -> None:
        self.anchor = weights.detach().clone()
        self.momentum = torch.zeros_like(self.anchor)
        self.steps = 0


@CATALOGUE.correct("diloco")
class DiLoCo(Strategy):
    """Local steps with an outer momentum."""

    def __init__(self, context: Context, config: Any = None) -> None:
        super().__init__(context, config or DiLoCoConfig())
        self.models: list[Module] = []
        self.outer: dict[Tensor, Outer] = {}

    # ------------------------------------------------------------------ preparing

    def setup(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            self.share(model)
            self.models.append(model)
            self.outer.update((parameter, Outer(parameter)) for parameter in model.parameters())
        return bundle

    @torch.no_grad()
    def share(self, model: Module) -> None:
        """Give the model on every process the values of the first process."""
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.detach().contiguous()
            self.context.process.transport.broadcast(sent, 0).wait()
            tensor.detach().copy_(sent)

    # ------------------------------------------------------------------ one step

    def after_step(self, model: Module | None, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self.is_due(parameter):
                    self.outer_step(parameter)

    def is_due(self, parameter: Tensor) -> bool:
        """Count an inner step of a parameter; whether an outer step follows it."""
        outer = self.outer[parameter]
        outer.steps += 1
        return bool(outer.steps % self.config.period == 0)

    @torch.no_grad()
    def outer_step(self, parameter: Tensor) -> None:
        """One step of the outer optimizer, from the mean of the weights."""
        outer = self.outer[parameter]
        outer.anchor -= self.config.outer_rate * self.update(outer, self.difference(outer, parameter))
        parameter.detach().copy_(outer.anchor)

    def difference(self, outer: Outer, parameter: Tensor) -> Tensor:
        """The outer gradient: how far the mean of the weights went from the anchor."""
        return outer.anchor - self.mean(parameter)

    def update(self, outer: Outer, gradient: Tensor) -> Tensor:
        """Nesterov's update for an outer gradient."""
        outer.momentum.mul_(self.config.outer_momentum).add_(gradient)
        return gradient + self.config.outer_momentum * outer.momentum

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over the processes."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.context.process.transport.all_reduce(total).wait()
        return total / self.context.process.world_size

    # ------------------------------------------------------------------ the weights of the run

    def global_weights(self, model: Module) -> AbstractContextManager[None]:
        return self.with_anchors(model)

    @contextmanager
    def with_anchors(self, model: Module) -> Iterator[None]:
        """The anchors, and the mean of the buffers."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        run: dict[Tensor, Tensor] = {one: self.outer[one].anchor for one in model.parameters()}
        run.update((buffer, self.mean(buffer)) for buffer in buffers)
        own = {tensor: tensor.detach().clone() for tensor in run}
        self.assign(run)
        try:
            yield
        finally:
            self.assign(own)

    @torch.no_grad()
    def assign(self, values: Mapping[Tensor, Tensor]) -> None:
        for tensor, value in values.items():
            tensor.detach().copy_(value)

    # ------------------------------------------------------------------ checkpoints

    def save(self, kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        """The first process writes the usual file, each other one a file of its own."""
        if self.context.process.rank == 0:
            super().save(kind, state, folder, index, safe_serialization=safe_serialization)
        else:
            torch.save(state, folder / self.file_of(kind, index))

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        own = folder / self.file_of(kind, index)
        if self.context.process.rank == 0 or not own.exists():
            super().load(kind, item, folder, index, **options)
            return
        # A scheduler's state may contain objects that the restricted reader refuses.
        state = torch.load(own, map_location=options.pop("map_location", None), weights_only=False)
        item.load_state_dict(state, **(options if kind is ObjectKind.MODEL else {}))

    def file_of(self, kind: ObjectKind, index: int) -> str:
        """The file of this process's own state of an object."""
        return f"own_{kind.value}_{index}_of_{self.context.process.rank}.pt"

    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        return {"outer": [[self.saved(self.outer[one]) for one in model.parameters()] for model in models]}

    def saved(self, outer: Outer) -> dict[str, Any]:
        """What a checkpoint contains of one parameter."""
        return {"anchor": outer.anchor, "momentum": outer.momentum, "steps": outer.steps}

    def load_extra_state(self, state: Mapping[str, Any], models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        for model, saved in zip(models, state["outer"], strict=True):
            for parameter, values in zip(model.parameters(), saved, strict=True):
                self.restore(parameter, values)

    def restore(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        outer = self.outer[parameter]
        outer.anchor.copy_(values["anchor"])
        outer.momentum.copy_(values["momentum"])
        outer.steps = values["steps"]

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        for model in models:
            self.models.remove(model)
            for parameter in model.parameters():
                self.outer.pop(parameter, None)


# ---------------------------------------------------------------- fifteen faults


@CATALOGUE.broken(
    "sum_of_the_differences",
    truth="The outer gradient is the sum of the processes' differences instead of their mean.",
    where="difference",
    finding="after an outer step the weights are not those of the algorithm; even equal processes go too far",
)
class SumOfTheDifferences(DiLoCo):
    def difference(self, outer: Outer, parameter: Tensor) -> Tensor:
        return super().difference(outer, parameter) * self.context.process.world_size


@CATALOGUE.broken(
    "averaged_twice",
    truth="The outer gradient is divided by the number of processes twice.",
    where="difference",
    finding="after an outer step the weights are not those of the algorithm; even equal processes do not go far enough",
)
class AveragedTwice(DiLoCo):
    def difference(self, outer: Outer, parameter: Tensor) -> Tensor:
        return super().difference(outer, parameter) / self.context.process.world_size


@CATALOGUE.broken(
    "wrong_sign",
    truth="The outer gradient points from the anchor to the mean, so the outer step undoes the training.",
    where="difference",
    finding="after an outer step the loss is higher, and the weights lie on the wrong side of the anchor",
)
class WrongSign(DiLoCo):
    def difference(self, outer: Outer, parameter: Tensor) -> Tensor:
        return self.mean(parameter) - outer.anchor


@CATALOGUE.broken(
    "anchor_never_moves",
    truth="The anchor stays the weights of the beginning; only the model gets the result of the outer step.",
    where="outer_step",
    finding="from the second outer step on the weights are not those of the algorithm",
)
class AnchorNeverMoves(DiLoCo):
    @torch.no_grad()
    def outer_step(self, parameter: Tensor) -> None:
        outer = self.outer[parameter]
        update = self.update(outer, self.difference(outer, parameter))
        parameter.detach().copy_(outer.anchor - self.config.outer_rate * update)


@CATALOGUE.broken(
    "nesterov_left_out",
    truth="The update is the momentum alone, without Nesterov's look ahead.",
    where="update",
    finding="the outer step is smaller than that of the algorithm",
)
class NesterovLeftOut(DiLoCo):
    def update(self, outer: Outer, gradient: Tensor) -> Tensor:
        outer.momentum.mul_(self.config.outer_momentum).add_(gradient)
        return outer.momentum


@CATALOGUE.broken(
    "momentum_forgotten",
    truth="The outer momentum starts from zero in each outer step.",
    where="update",
    finding="from the second outer step on the weights are not those of the algorithm",
)
class MomentumForgotten(DiLoCo):
    def update(self, outer: Outer, gradient: Tensor) -> Tensor:
        outer.momentum = torch.zeros_like(gradient)
        return super().update(outer, gradient)


@CATALOGUE.broken(
    "outer_rate_ignored",
    truth="The outer step has a learning rate of 1 whatever the settings say.",
    where="outer_step",
    finding="the outer step is larger than that of the algorithm",
)
class OuterRateIgnored(DiLoCo):
    @torch.no_grad()
    def outer_step(self, parameter: Tensor) -> None:
        outer = self.outer[parameter]
        outer.anchor -= self.update(outer, self.difference(outer, parameter))
        parameter.detach().copy_(outer.anchor)


@CATALOGUE.broken(
    "outer_step_at_once",
    truth="The counter is read before it is increased: the first outer step follows the first inner step.",
    where="is_due",
    finding="the processes agree after steps 1, 1 + period, ... instead of period, 2 period, ...",
)
class OuterStepAtOnce(DiLoCo):
    def is_due(self, parameter: Tensor) -> bool:
        due = self.outer[parameter].steps % self.config.period == 0
        super().is_due(parameter)
        return bool(due)


@CATALOGUE.broken(
    "own_weights_as_global",
    truth="global_weights leaves each process its own weights.",
    where="global_weights",
    finding="the weights inside of global_weights differ between the processes",
)
class OwnWeightsAsGlobal(DiLoCo):
    def global_weights(self, model: Module) -> AbstractContextManager[None]:
        return nullcontext()


@CATALOGUE.broken(
    "global_weights_remain",
    truth="After global_weights the model keeps the anchors.",
    where="global_weights",
    finding="an evaluation changes the weights that are trained",
)
class GlobalWeightsRemain(DiLoCo):
    @contextmanager
    def with_anchors(self, model: Module) -> Iterator[None]:
        self.assign({parameter: self.outer[parameter].anchor for parameter in model.parameters()})
        yield


@CATALOGUE.broken(
    "biases_stay_local",
    truth="Parameters of one dimension make no outer step.",
    where="is_due",
    finding="after an outer step the biases differ between the processes",
)
class BiasesStayLocal(DiLoCo):
    def is_due(self, parameter: Tensor) -> bool:
        return super().is_due(parameter) and parameter.dim() > 1


@CATALOGUE.broken(
    "counter_not_saved",
    truth="A resumed run counts the inner steps of a period from zero.",
    where="restore",
    finding="a run that resumes between two outer steps makes the next one too late",
)
class CounterNotSaved(DiLoCo):
    def restore(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        super().restore(parameter, {**values, "steps": 0})


@CATALOGUE.broken(
    "anchor_not_saved",
    truth="A resumed run takes the loaded weights of each process for the anchor.",
    where="restore",
    finding="a run that resumes between two outer steps goes on with other weights after the next one",
)
class AnchorNotSaved(DiLoCo):
    def restore(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        super().restore(parameter, {**values, "anchor": parameter.detach()})


@CATALOGUE.broken(
    "all_resume_from_the_first",
    truth="Only the first process writes its weights and its optimizer, and all processes resume from them.",
    where="save",
    finding="a run that resumes between two outer steps goes on with other weights on the second process",
    capabilities=Capabilities(join=False, average_parameters=False, equal_replicas=False),
)
class AllResumeFromTheFirst(DiLoCo):
    def save(self, kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        Strategy.save(self, kind, state, folder, index, safe_serialization=safe_serialization)

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        Strategy.load(self, kind, item, folder, index, **options)


@CATALOGUE.broken(
    "one_counter_for_all",
    truth="One counter counts the steps of all optimizers, so with two of them each makes its outer steps at the wrong "
    "time.",
    where="after_step",
    finding="with two models, outer steps come twice as often, or never for one of the models",
)
class OneCounterForAll(DiLoCo):
    def __init__(self, context: Context, config: Any = None) -> None:
        super().__init__(context, config)
        self.steps = 0

    def after_step(self, model: Module | None, optimizer: Optimizer) -> None:
        self.steps += 1
        super().after_step(model, optimizer)

    def is_due(self, parameter: Tensor) -> bool:
        return bool(self.steps % self.config.period == 0)

    def saved(self, outer: Outer) -> dict[str, Any]:
        return {**super().saved(outer), "steps": self.steps}

    def restore(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        super().restore(parameter, values)
        self.steps = values["steps"]
