"""Gradients that the wrapper of a model does not reduce: of parameters that it ignores, that were frozen when the model
was wrapped, or that are added later. They are averaged at the end of each backward in which the wrapper reduces others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins.parameters import canonical_name
from accel_state.errors import NotOffered
from accel_state.transport.base import Transport

__all__ = ("UnreducedGradients",)


class UnreducedGradients:
    """Averages the gradients of some parameters of a model, and of all that are registered in it later.

    Parameters cost nothing while they are frozen. All processes unfreeze and add the same ones.

    Args:
        model: the model, with the parameters that train.
        parameters: those whose gradients nothing reduces, frozen or not.
        transport: connects the processes.
        reduces: whether the current backward reduces gradients.
        replaces: whether the wrapper itself assigns new parameters under names that exist.

    Attributes:
        joins: whether processes may have run out of batches, so that they do not take part.
    """

    def __init__(
        self,
        model: Module,
        parameters: Iterable[Parameter],
        transport: Transport,
        reduces: Callable[[], bool],
        replaces: bool = False,
    ) -> None:
        self.joins = False
        self._model, self._transport, self._reduces, self._replaces = weakref.ref(model), transport, reduces, replaces
        self._parameters: list[weakref.ref[Parameter]] = []
        self._backward = -1
        for parameter in parameters:
            self._average(parameter)
        self._known: Any = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
        _follow(model, self)

    def added(self, module: Module, name: str, added: Module | Parameter) -> None:
        """Average the gradients of a parameter, or of a module's, that is about to be registered in the model."""
        if isinstance(added, Module):
            _follow(added, self)
            new = list(added.parameters())
        else:
            new = [] if self._replaces and name in module._parameters else [added]
        for parameter in new:
            if parameter not in self._known:
                self._known[parameter] = None
                self._average(parameter)

    def _average(self, parameter: Parameter) -> None:
        trainable = parameter.is_floating_point() or parameter.is_complex()
        # Who shards a parameter reduces its gradient.
        if not trainable or hasattr(parameter, "placements") or self._transport.world_size == 1:
            return
        self._parameters.append(weakref.ref(parameter))
        trains = parameter.requires_grad
        # torch refuses hooks of frozen parameters, and keeps them when a parameter is frozen.
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._computed)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trains)

    def _computed(self, parameter: Tensor) -> None:
        """Let the end of this backward average all gradients.

        Not each gradient at once: processes may compute them in another order, and some of them not at all.
        """
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and self._reduces():
            self._backward = backward
            Variable._execution_engine.queue_callback(self._average_all)

    @torch.no_grad()
    def _average_all(self) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._parameters = [reference for reference in self._parameters if reference() is not None]
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        if self.joins:
            raise self._refusal(kinds)
        for parameters in kinds.values():
            self._average_alike(parameters)

    def _average_alike(self, parameters: list[Tensor]) -> None:
        """Average the gradients of parameters of one device and dtype; a process without one contributes zeros."""
        gradients = [parameter.grad for parameter in parameters]
        pieces = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        exist = pieces[0].new_tensor([gradient is not None for gradient in gradients])
        flat = torch.cat([*(piece.reshape(-1) for piece in pieces), exist])
        self._transport.all_reduce(flat).wait()
        sizes = [*(piece.numel() for piece in pieces), len(pieces)]
        *means, exist = torch.split(flat / self._transport.world_size, sizes)
        # Reading it waits for the device.
        elsewhere = exist.tolist() if any(gradient is None for gradient in gradients) else ()
        for index, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
            elif elsewhere[index]:
                parameter.grad = mean.view_as(parameter).clone()

    def _refusal(self, kinds: dict[Any, list[Tensor]]) -> NotOffered:
        model = self._model()
        own = {id(parameter) for parameters in kinds.values() for parameter in parameters}
        named = [] if model is None else model.named_parameters()
        names = [canonical_name(name) for name, parameter in named if id(parameter) in own]
        return NotOffered(
            "Cannot average gradients inside join_uneven_inputs.",
            f"{', '.join(names[:3])}{', ...' if names[3:] else ''} were frozen or absent when the model was prepared. "
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
