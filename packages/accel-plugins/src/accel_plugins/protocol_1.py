"""Backends that were written for version 1 of the interface, run by version 2.

Version 1 had class attributes of the strategy where version 2 has `Manifest.traits`, other names for two methods, and a
`backward` that did not receive the model. This module goes with version 3.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from accel_plugins.manifest import Part, Traits
from accel_plugins.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = ("adapted", "traits_of")


_USUAL: Final = Traits()


class _Names1(Strategy):
    """What a strategy of version 1 inherits beside what both versions have."""

    save_order: ClassVar[Sequence[Part]] = _USUAL.save_order
    load_order: ClassVar[Sequence[Part]] = _USUAL.load_order
    saves_together: ClassVar[bool] = _USUAL.collective_save
    saves_behind: ClassVar[bool] = _USUAL.supports_async_save
    save_options: ClassVar[frozenset[str]] = _USUAL.save_options
    gives_partial_gradients: ClassVar[bool] = _USUAL.can_checkpoint_partial_grads
    gathers_each_parameter: ClassVar[bool] = _USUAL.per_parameter_sharding
    syncs_in_own_forward: ClassVar[bool] = _USUAL.syncs_in_own_forward

    def part_held(self) -> Hashable:
        return None

    def before_gradients_are_read(self, optimizer: Optimizer) -> None:
        """Make an optimizer's gradients complete."""


class _Names2(Strategy):
    """Answers the questions of version 2 by the methods of version 1."""

    def shard_key(self) -> Hashable:
        old: Any = self
        answer: Hashable = old.part_held()
        return answer

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        old: Any = self
        old.before_gradients_are_read(optimizer)

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)


def adapted(strategy: type[Strategy]) -> type[Strategy]:
    """A strategy of version 1 as one of version 2."""
    # The plugin's methods stand between the two, so that their calls of `super()` find the names of version 1.
    kept = {"__module__": strategy.__module__, "__doc__": strategy.__doc__}
    # A type checker cannot order bases that it does not know.
    bases: Any = (_Names2, strategy, _Names1)
    made: type[Strategy] = type(strategy.__name__, bases, kept)
    return made


def traits_of(strategy: type[Strategy]) -> Traits:
    """What the class attributes of an adapted strategy declare."""
    old: Any = strategy
    return Traits(
        save_order=tuple(old.save_order),
        load_order=tuple(old.load_order),
        collective_save=old.saves_together,
        supports_async_save=old.saves_behind,
        save_options=frozenset(old.save_options),
        can_checkpoint_partial_grads=old.gives_partial_gradients,
        per_parameter_sharding=old.gathers_each_parameter,
        syncs_in_own_forward=old.syncs_in_own_forward,
    )
