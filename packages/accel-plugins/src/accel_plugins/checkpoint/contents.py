"""What a checkpoint holds, and what saving and loading ask of whoever owns a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.nn import Module

from accel_plugins.layers import strategy_model
from accel_plugins.manifest import Part

__all__ = ("Contents", "LoadHook", "SaveHook", "Saver", "Stateful")

SaveHook = Callable[[list[Module], list[Any], str], None]
LoadHook = Callable[[list[Module], str], None]


class Stateful(Protocol):
    """An object whose state can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what `state_dict` returned."""


class Saver(Protocol):
    """What saving and loading ask of a strategy; see `accel_plugins.strategy.Strategy`."""

    @property
    def save_order(self) -> Sequence[Part]:
        """Parts to save, in order."""

    @property
    def load_order(self) -> Sequence[Part]:
        """Parts to load, in order."""

    @property
    def saves_together(self) -> bool:
        """Whether every process must call `save`."""

    def collect(self, part: Part, item: Any) -> Any:
        """State of one object."""

    def save(self, part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        """Write a state."""

    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        """Read a state."""

    def unwrap(self, model: Module) -> Module:
        """The user's model."""


@dataclass
class Contents:
    """Everything a checkpoint holds.

    Args:
        models, optimizers, schedulers: as `prepare` returned them, in order.
        loaders: loaders whose position is saved, and restored by a load.
        scaler: whatever keeps the scale of the loss, the precision for example; left out when its state is empty.
        custom: objects registered for checkpointing.
    """

    models: list[Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    scaler: Stateful | None = None
    custom: list[Any] = field(default_factory=list)

    def of_kind(self, part: Part) -> list[Any]:
        """The objects of one kind."""
        kinds: dict[Part, list[Any]] = {
            Part.MODEL: self.models,
            Part.OPTIMIZER: self.optimizers,
            Part.SCHEDULER: self.schedulers,
            Part.LOADER: self.loaders,
        }
        return kinds[part]

    def for_strategy(self, part: Part) -> list[Any]:
        """The objects of one kind as a strategy knows them: its models without the layers around them."""
        items = self.of_kind(part)
        return [strategy_model(model) for model in items] if part is Part.MODEL else items
