"""Compressed gradients with one planted fault each, for the test kit to find.

`SignsWithFeedback` works: each process sends the sign of each entry and one scale for each parameter, and adds what it
could not send to the next gradient (error feedback). Without `compress` it sends the gradients as they are, and
computes what one process computes. Every other strategy is `SignsWithFeedback` with a single fault.

    entry = CATALOGUE["error_left_out"]
    entry.target      "catalogues.compressing_backends:error_left_out", which leads to its Manifest
    entry.truth       what is wrong
    entry.where       the method that is wrong
    entry.finding     what a detector has to report
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from accel_plugins.precision.base import Closure
from accel_plugins.strategy import Strategy
from accel_state.kwargs import KwargsHandler
from catalogues.faulty_backend import Faults

__all__ = ("CATALOGUE", "SignConfig", "SignsWithFeedback")

CATALOGUE: Final = Faults(
    config=f"{__name__}:SignConfig",
    # What is left of a gradient has the loss scale of its step, so fp16 would need more than this strategy does.
    capabilities=Capabilities(join=False, fp16=False),
)
"""By name, twenty-five backends with a fault; `CATALOGUE.control` has none."""


def __getattr__(name: str) -> Manifest:
    return CATALOGUE.manifest(name)


@dataclass
class SignConfig(KwargsHandler):
    """Whether gradients are compressed; without, the backend computes what one process computes."""

    compress: bool = False


@CATALOGUE.correct("signs_with_feedback")
class SignsWithFeedback(Strategy):
    """Every process holds the whole model; gradients are exchanged once in each step, when they are finalised."""

    def __init__(self, context: Context, config: Any = None) -> None:
        super().__init__(context, config or SignConfig())
        self.models: list[Module] = []
        self.residuals: dict[Tensor, Tensor] = {}
        self.complete: set[Tensor] = set()
        self.hooks: dict[Module, list[Any]] = {}

    # ------------------------------------------------------------------ preparing

    def setup(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            self.share(model.parameters())
            self.share(model.buffers())
            self.models.append(model)
            self.hooks[model] = [
                parameter.register_post_accumulate_grad_hook(self.complete.discard)
                for parameter in model.parameters()
                if parameter.requires_grad
            ]
        return bundle

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give the tensors on every process the values of the first process."""
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            self.context.process.transport.broadcast(sent, 0).wait()
            tensor.detach().copy_(sent)

    # ------------------------------------------------------------------ one step

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        parameters = self.parameters_of(optimizer)
        if all(parameter in self.complete for parameter in parameters):
            return
        self.exchange(parameters)
        self.complete.update(parameters)

    def parameters_of(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters whose gradients are exchanged before a step of an optimizer."""
        return [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]

    @torch.no_grad()
    def exchange(self, parameters: Sequence[Tensor]) -> None:
        """Replace gradients by their means over the processes."""
        present = torch.tensor([float(one.grad is not None) for one in parameters], device=self.context.process.device)
        self.context.process.transport.all_reduce(present).wait()
        for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(self.mean(self.message(parameter, parameter.grad)))

    def message(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What this process sends of a gradient."""
        if not self.config.compress:
            return gradient
        corrected = self.corrected(parameter, gradient)
        sent = self.scale(parameter, corrected) * corrected.sign()
        if sent.isfinite().all():
            self.residuals[parameter] = corrected - sent
        return sent

    def corrected(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with what was left of the last one."""
        return gradient + self.residuals.get(parameter, torch.zeros_like(gradient))

    def scale(self, parameter: Tensor, corrected: Tensor) -> Tensor:
        """The size of the entries of a message."""
        return corrected.abs().mean()

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over the processes."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.context.process.transport.all_reduce(total).wait()
        return total / self.context.process.world_size

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        self.complete.difference_update(self.parameters_of(optimizer))
        if closure is None:
            return super().step(optimizer)

        def with_exchange() -> Any:
            loss = closure()
            self.exchange(self.parameters_of(optimizer))
            return loss

        return super().step(optimizer, with_exchange)

    def after_step(self, model: Module | None, optimizer: Optimizer) -> None:
        for one in self.models if model is None else [model]:
            self.share(one.buffers())

    @torch.no_grad()
    def average_parameters(self, model: Module) -> None:
        for parameter in model.parameters():
            parameter.detach().copy_(self.mean(parameter))

    # ------------------------------------------------------------------ checkpoints

    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        return {"residuals": {name: self.residuals[one] for name, one in self.named(models) if one in self.residuals}}

    def load_extra_state(self, state: Mapping[str, Any], models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        residuals = state["residuals"]
        for name, one in self.named(models):
            self.residuals.pop(one, None)
            if name in residuals:
                self.residuals[one] = residuals[name].clone().to(one.device)

    def named(self, models: Sequence[Module]) -> list[tuple[str, Tensor]]:
        """Every parameter of models by a name that is the same in each run."""
        return [
            (f"{index}.{name}", parameter)
            for index, model in enumerate(models)
            for name, parameter in model.named_parameters()
        ]

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        for model in models:
            self.models.remove(model)
            for hook in self.hooks.pop(model):
                hook.remove()
            for parameter in model.parameters():
                self.residuals.pop(parameter, None)
                self.complete.discard(parameter)


# ---------------------------------------------------------------- twenty-five faults: what is sent


@CATALOGUE.broken(
    "sum_instead_of_mean",
    truth="Gradients are the sum over the processes.",
    where="mean",
    finding="gradients and updates are as many times too large as there are processes",
)
class SumInsteadOfMean(SignsWithFeedback):
    def mean(self, tensor: Tensor) -> Tensor:
        return super().mean(tensor) * self.context.process.world_size


@CATALOGUE.broken(
    "error_left_out",
    truth="What could not be sent is kept, and never added to the next gradient.",
    where="corrected",
    finding="from the second step on gradients are not those of the algorithm",
)
class ErrorLeftOut(SignsWithFeedback):
    def corrected(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient.clone()


@CATALOGUE.broken(
    "error_subtracted",
    truth="What could not be sent is subtracted from the next gradient.",
    where="corrected",
    finding="from the second step on gradients are not those of the algorithm",
)
class ErrorSubtracted(SignsWithFeedback):
    def corrected(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient - self.residuals.get(parameter, torch.zeros_like(gradient))


@CATALOGUE.broken(
    "error_of_the_mean",
    truth="The residual is what the mean of the messages leaves of the gradient, not what the own message leaves.",
    where="exchange",
    finding="from the second step on gradients are not those of the algorithm",
)
class ErrorOfTheMean(SignsWithFeedback):
    def message(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        corrected = self.corrected(parameter, gradient)
        sent = super().message(parameter, gradient)
        if self.config.compress:
            self.residuals[parameter] = corrected - self.mean(sent)
        return sent


@CATALOGUE.broken(
    "scale_of_the_first_parameter",
    truth="The scale of the first parameter is used for all.",
    where="scale",
    finding="gradients of all parameters but one are not those of the algorithm",
)
class ScaleOfTheFirstParameter(SignsWithFeedback):
    first: Tensor | None = None
    size: Tensor | None = None

    def scale(self, parameter: Tensor, corrected: Tensor) -> Tensor:
        if self.first is None or self.first is parameter or self.size is None:
            self.first, self.size = parameter, super().scale(parameter, corrected)
        return self.size


@CATALOGUE.broken(
    "scale_without_the_error",
    truth="The scale is that of the gradient before the residual was added.",
    where="scale",
    finding="from the second step on gradients are not those of the algorithm",
)
class ScaleWithoutTheError(SignsWithFeedback):
    def scale(self, parameter: Tensor, corrected: Tensor) -> Tensor:
        assert parameter.grad is not None
        return super().scale(parameter, parameter.grad)


@CATALOGUE.broken(
    "message_in_bfloat16",
    truth="Messages are rounded to bfloat16, and the residual does not know of it.",
    where="mean",
    finding="gradients differ from the right ones by about one part in 300",
)
class MessageInBfloat16(SignsWithFeedback):
    def mean(self, tensor: Tensor) -> Tensor:
        return super().mean(tensor.to(torch.bfloat16).to(tensor.dtype))


# ---------------------------------------------------------------- when it is sent, and of which parameters


@CATALOGUE.broken(
    "exchanged_again",
    truth="Each call of finalize_gradients exchanges, also the second one of a step.",
    where="finalize_gradients",
    finding="with clipping, the gradients of a step are compressed twice and exchanged twice",
)
class ExchangedAgain(SignsWithFeedback):
    def finalize_gradients(self, optimizer: Optimizer) -> None:
        self.exchange(self.parameters_of(optimizer))


@CATALOGUE.broken(
    "exchanged_in_each_pass",
    truth="Gradients are exchanged after each backward, also under no_sync.",
    where="backward",
    finding="backward under no_sync calls collectives",
)
class ExchangedInEachPass(SignsWithFeedback):
    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        super().backward(loss, model, **kwargs)
        for one in self.models if model is None else [model]:
            self.exchange([parameter for parameter in one.parameters() if parameter.requires_grad])

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        """Nothing is left to do."""


@CATALOGUE.broken(
    "first_group_only",
    truth="Only the parameters of the optimizer's first group are exchanged.",
    where="parameters_of",
    finding="parameters of further groups have each process's own gradients",
)
class FirstGroupOnly(SignsWithFeedback):
    def parameters_of(self, optimizer: Optimizer) -> list[Tensor]:
        return [one for one in optimizer.param_groups[0]["params"] if one.requires_grad]


@CATALOGUE.broken(
    "small_parameters_stay_local",
    truth="Parameters of fewer than three entries are not worth a message, and keep each process's own gradients.",
    where="exchange",
    finding="small parameters have each process's own gradients, and differ between the processes",
)
class SmallParametersStayLocal(SignsWithFeedback):
    def exchange(self, parameters: Sequence[Tensor]) -> None:
        super().exchange([one for one in parameters if one.numel() > 2])


@CATALOGUE.broken(
    "missing_on_one_process",
    truth="A process without a gradient of a parameter takes part in its exchange, and does not get the result.",
    where="exchange",
    finding="a parameter without a gradient on one process differs between the processes after the step",
)
class MissingOnOneProcess(SignsWithFeedback):
    def exchange(self, parameters: Sequence[Tensor]) -> None:
        missing = [one for one in parameters if one.grad is None]
        super().exchange(parameters)
        for parameter in missing:
            parameter.grad = None


@CATALOGUE.broken(
    "divided_by_passes",
    truth="Gradients are divided by the number of passes of the window, which the loss was divided by already.",
    where="finalize_gradients",
    finding="with accumulation over k passes, gradients and updates are 1/k of the right ones",
)
class DividedByPasses(SignsWithFeedback):
    passes = 0

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        super().backward(loss, model, **kwargs)
        self.passes += 1

    def exchange(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= max(self.passes, 1)
        self.passes = 0
        super().exchange(parameters)


@CATALOGUE.broken(
    "buffers_never_shared",
    truth="Buffers are each process's own, at the start and ever after.",
    where="setup, after_step",
    finding="buffers differ between the processes",
)
class BuffersNeverShared(SignsWithFeedback):
    def share(self, tensors: Iterable[Tensor]) -> None:
        super().share(one for one in tensors if isinstance(one, torch.nn.Parameter))


# ---------------------------------------------------------------- checkpoints


@CATALOGUE.broken(
    "residuals_not_saved",
    truth="A checkpoint does not contain what was not sent.",
    where="extra_state",
    finding="a resumed run goes on with other gradients",
)
class ResidualsNotSaved(SignsWithFeedback):
    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        return {}


@CATALOGUE.broken(
    "residuals_of_the_first_process",
    truth="Each process gets what the first process had not sent.",
    where="extra_state",
    finding="a resumed run goes on with other gradients",
)
class ResidualsOfTheFirstProcess(SignsWithFeedback):
    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        residuals = {name: one.clone() for name, one in super().extra_state(models, optimizers)["residuals"].items()}
        self.share(residuals.values())
        return {"residuals": residuals}


@CATALOGUE.broken(
    "residuals_by_address",
    truth="Residuals are saved by the address of their parameter in this process.",
    where="named",
    finding="a new process finds none of the residuals",
)
class ResidualsByAddress(SignsWithFeedback):
    def named(self, models: Sequence[Module]) -> list[tuple[str, Tensor]]:
        return [(str(id(parameter)), parameter) for _, parameter in super().named(models)]


@CATALOGUE.broken(
    "residuals_of_models_collide",
    truth="Residuals are saved by the names of the parameters alone, which two models share.",
    where="named",
    finding="a resumed run of two models goes on with the residuals of one of them for both",
)
class ResidualsOfModelsCollide(SignsWithFeedback):
    def named(self, models: Sequence[Module]) -> list[tuple[str, Tensor]]:
        return [(name.partition(".")[2], parameter) for name, parameter in super().named(models)]


@CATALOGUE.broken(
    "load_is_always_strict",
    truth="load drops its options, so strict=False raises for a state with other names.",
    where="load",
    finding="a state that lacks a name is refused with strict=False",
)
class LoadIsAlwaysStrict(SignsWithFeedback):
    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        super().load(kind, item, folder, index)


@CATALOGUE.broken(
    "load_weights_is_never_strict",
    truth="load_weights ignores strict, and accepts weights with other names.",
    where="load_weights",
    finding="weights that lack a name are accepted with strict=True",
)
class LoadWeightsIsNeverStrict(SignsWithFeedback):
    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        super().load_weights(model, weights, strict=False)


# ---------------------------------------------------------------- the rest of the interface


@CATALOGUE.broken(
    "one_batch_per_step",
    truth="A step of the run is said to have one batch, whatever the number of processes.",
    where="batches_per_step",
    finding="a schedule advances as many times too slowly as there are processes",
)
class OneBatchPerStep(SignsWithFeedback):
    def batches_per_step(self) -> int:
        return 1


@CATALOGUE.broken(
    "closure_ignored",
    truth="step drops the closure.",
    where="step",
    finding="a step by a closure computes no gradients, or raises",
)
class ClosureIgnored(SignsWithFeedback):
    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        return super().step(optimizer)


@CATALOGUE.broken(
    "keyword_arguments_dropped",
    truth="backward drops its further arguments, such as retain_graph.",
    where="backward",
    finding="a second backward through a graph that was to be retained raises",
)
class KeywordArgumentsDropped(SignsWithFeedback):
    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        super().backward(loss, model)


@CATALOGUE.broken(
    "norm_after_clipping",
    truth="clip_norm returns the norm that the gradients have after they were clipped.",
    where="clip_norm",
    finding="the norm that is returned never exceeds the bound",
)
class NormAfterClipping(SignsWithFeedback):
    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        clipped = list(parameters)
        super().clip_norm(clipped, max_norm, norm_type)
        return super().clip_norm(clipped, float("inf"), norm_type)


@CATALOGUE.broken(
    "residuals_outlive_release",
    truth="release keeps the hooks, and with them the parameters, of models that are not used any more.",
    where="release",
    finding="the memory of a released model is not freed",
)
class ResidualsOutliveRelease(SignsWithFeedback):
    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        for model in models:
            self.models.remove(model)
