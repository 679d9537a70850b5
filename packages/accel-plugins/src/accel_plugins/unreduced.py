"""Gradients that the wrapper of a model does not reduce: of parameters that it ignores, that were frozen when the model
was wrapped, or that are added later.

They are averaged after each `backward` in which the wrapper reduces others, and at the latest before a step. Processes
may use different parameters, and some of them none, so nothing depends on which gradients a process has: all processes
average the gradients of all such parameters that train.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins.context import Context
from accel_plugins.parameters import canonical_name
from accel_plugins.strategy import Strategy
from accel_state.errors import NotOffered, ReplicasDiffer, ShapeMismatch
from accel_state.protocol.call import HeaderCall
from accel_state.transport.base import Transport

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.precision.base import Closure

__all__ = ("AveragingStrategy", "UnreducedGradients")


class UnreducedGradients:
    """Averages the gradients of some parameters of a model, and of all that are registered in it later.

    Parameters cost no collective while they are frozen. All processes unfreeze and add the same ones.

    Args:
        model: the model, with the parameters that train.
        parameters: those whose gradients nothing reduces, frozen or not.
        transport: connects the processes.
        reduces: whether backward reduces gradients now.
        replaces: whether the wrapper itself assigns new parameters under names that exist.

    Attributes:
        joins: whether processes may have run out of batches, so that they do not take part.
        are_complete: whether the gradients for the next step are averaged.
    """

    def __init__(
        self,
        model: Module,
        parameters: Iterable[Parameter],
        transport: Transport,
        reduces: Callable[[], bool],
        replaces: bool = False,
    ) -> None:
        self.joins = self.are_complete = False
        self._model, self._transport, self._reduces, self._replaces = weakref.ref(model), transport, reduces, replaces
        self._parameters: Any = WeakIdKeyDictionary()
        self._agreed: list[str] = []
        self._all_parameters: Any = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
        for parameter in parameters:
            self._add(parameter)
        _follow(model, self)

    def added(self, module: Module, name: str, added: Module | Parameter) -> None:
        """Average the gradients of a parameter, or of a module's, that is about to be registered in the model."""
        if isinstance(added, Module):
            _follow(added, self)
            new = list(added.parameters())
        else:
            new = [] if self._replaces and name in module._parameters else [added]
        for parameter in new:
            if parameter not in self._all_parameters:
                self._all_parameters[parameter] = None
                self._add(parameter)

    def _add(self, parameter: Parameter) -> None:
        # Who shards a parameter reduces its gradient.
        if not hasattr(parameter, "placements"):
            self._parameters[parameter] = None

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._parameters

    def average(self) -> None:
        """Average the gradients over the processes, if backward reduces now. Called after each backward."""
        self.are_complete = self._reduces()
        if self.are_complete and self._transport.world_size > 1:
            self._average(self._trained())

    def complete(self, optimizer: Optimizer) -> None:
        """Average gradients that another call than the strategy's `backward` computed, before an optimizer steps."""
        if not self.are_complete and self._some_train() and self._has_parameter_of(optimizer):
            self.average()

    def _some_train(self) -> bool:
        return any(parameter.requires_grad for parameter in self._parameters)

    def _has_parameter_of(self, optimizer: Optimizer) -> bool:
        model = self._model()
        own = set() if model is None else {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def _trained(self) -> dict[str, Parameter]:
        """The parameters that train, by name, in the order of the model, which is that of all processes."""
        model = self._model()
        if model is None or not self._some_train():
            return {}
        return {
            canonical_name(name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter in self._parameters
        }

    @torch.no_grad()
    def _average(self, trained: dict[str, Parameter]) -> None:
        if self.joins and trained:
            raise _refusal(list(trained))
        self._agree(trained)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in trained.values():
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for parameters in kinds.values():
            self._average_alike(parameters)

    def _agree(self, trained: dict[str, Parameter]) -> None:
        """Compare with the other processes what trains, when it has changed.

        Raises:
            ReplicasDiffer: on every process that makes this call.
        """
        described = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in trained.items()]
        if described == self._agreed:
            return
        try:
            with HeaderCall(self._transport, "backward", parameters=described) as call:
                call.barrier()
        except ShapeMismatch as error:
            raise ReplicasDiffer(
                "The processes train different parameters.",
                f"On this process {_first(list(trained)) or 'no parameters'} train, of those that were frozen or "
                f"absent when the model was prepared. {error.obstacle}",
                "Unfreeze, freeze and add parameters on all processes at the same step.",
            ) from error
        self._agreed = described

    def _average_alike(self, parameters: list[Tensor]) -> None:
        """Average the gradients of parameters of one device and dtype."""
        self._average_parts(parameters, self._mean)

    def _mean(self, flat: Tensor) -> Tensor:
        self._transport.all_reduce(flat).wait()
        return flat / self._transport.world_size

    def _average_parts(self, parameters: list[Tensor], mean_of: Callable[[Tensor], Tensor]) -> None:
        """Replace gradients by their means; a process without one contributes zeros.

        Args:
            parameters: parameters of one device and dtype, whole or the parts that this process has.
            mean_of: averages a tensor over the processes.
        """
        gradients = [parameter.grad for parameter in parameters]
        pieces = [
            torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        exist = pieces[0].new_tensor([gradient is not None for gradient in gradients])
        sparse = pieces[0].new_tensor([gradient is not None and gradient.is_sparse for gradient in gradients])
        flat = torch.cat([*(piece.reshape(-1) for piece in pieces), exist, sparse])
        sizes = [*(piece.numel() for piece in pieces), len(pieces), len(pieces)]
        *means, exist, sparse = torch.split(mean_of(flat), sizes)
        elsewhere: list[float] = []
        sparse_elsewhere: list[float] = []
        if any(gradient is None for gradient in gradients):
            # Reading them waits for the device.
            elsewhere, sparse_elsewhere = torch.stack([exist, sparse]).tolist()
        for index, (parameter, gradient, mean) in enumerate(zip(parameters, gradients, means, strict=True)):
            mean = mean.view_as(parameter)
            if gradient is None:
                if elsewhere[index]:
                    parameter.grad = mean.to_sparse(1) if sparse_elsewhere[index] else mean.clone()
            elif gradient.is_sparse:
                # As embeddings make them: optimizers for sparse gradients take no others.
                parameter.grad = mean.to_sparse(gradient.sparse_dim())
            else:
                gradient.copy_(mean)


class AveragingStrategy(Strategy):
    """A strategy whose wrapper reduces the gradients of some parameters; those of all others are averaged here.

    Attributes:
        unreduced: the gradients that the wrapper of a model that `setup` returned does not reduce, by model.
    """

    def __init__(self, context: Context, config: Any = None) -> None:
        super().__init__(context, config)
        self.unreduced: weakref.WeakKeyDictionary[Module, UnreducedGradients] = weakref.WeakKeyDictionary()

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        super().backward(loss, model, **kwargs)
        for prepared, gradients in list(self.unreduced.items()):
            if model is None or prepared is model:
                gradients.average()

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        super().finalize_gradients(optimizer)
        for gradients in list(self.unreduced.values()):
            gradients.complete(optimizer)

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        stepped = super().step(optimizer, None if closure is None else self._anew(closure))
        self._begin_step()
        return stepped

    def leave_out(self, optimizer: Optimizer) -> None:
        super().leave_out(optimizer)
        self._begin_step()

    def _anew(self, closure: Closure) -> Closure:
        """A closure whose gradients are averaged at each call."""

        def compute() -> Any:
            self._begin_step()
            return closure()

        return compute

    def _begin_step(self) -> None:
        for gradients in self.unreduced.values():
            gradients.are_complete = False

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        for model in models:
            self.unreduced.pop(model, None)


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"


def _refusal(names: list[str]) -> NotOffered:
    return NotOffered(
        "Cannot average gradients inside join_uneven_inputs.",
        f"{_first(names)} were frozen or absent when the model was prepared. "
        "Processes that have run out of batches do not take part in averaging such gradients.",
        "Unfreeze or add these parameters before prepare().",
    )


_followed: Final[weakref.WeakKeyDictionary[Module, UnreducedGradients]] = weakref.WeakKeyDictionary()
"""The modules of prepared models."""

_hooks: Final[list[Any]] = []
"""Handles of torch's hooks for registrations in any module of the process, once there are followed models."""


def _follow(model: Module, gradients: UnreducedGradients) -> None:
    if not _hooks:
        _hooks.append(register_module_parameter_registration_hook(_registers))
        _hooks.append(register_module_module_registration_hook(_registers))
    for module in model.modules():
        _followed[module] = gradients


def _registers(module: Module, name: str, added: Module | Parameter | None) -> None:
    # FSDP 1 registers its parameters at each forward, also in one that is compiled.
    if added is None or torch.compiler.is_compiling():
        return
    gradients = _followed.get(module)
    if gradients is not None:
        gradients.added(module, name, added)
