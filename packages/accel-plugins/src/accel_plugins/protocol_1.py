"""Adapter that runs backends of version 1 of the interface.

In version 1, the strategy had class attributes instead of `Manifest.traits`, two methods had other names, and
`backward` did not receive the model. Version 3 will remove this module.
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
    """Attributes and methods that only strategies of version 1 inherit."""

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
    """Implements methods of version 2 with those of version 1."""

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
    """Adapt a strategy class of version 1 to version 2."""
    # The plugin's class comes between the two bases, so that its `super()` calls find the names of version 1.
    kept = {"__module__": strategy.__module__, "__doc__": strategy.__doc__}
    # Type checkers do not know these bases.
    bases: Any = (_Names2, strategy, _Names1)
    made: type[Strategy] = type(strategy.__name__, bases, kept)
    return made


def traits_of(strategy: type[Strategy]) -> Traits:
    """The traits that the class attributes of an adapted strategy declare."""
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
