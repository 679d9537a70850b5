"""The interface of a transform: a change of the model that goes with any strategy, such as tensor parallelism.

Transforms are given to whoever prepares; `ordered` sorts them once into the order in which they are applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from accel_plugins.manifest import Duty, Manifest, Phase

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context

__all__ = ("Stage", "Transform", "ordered")


class Stage(IntEnum):
    """The order among transforms of one phase: what splits weights comes first, what compiles comes last."""

    SPLIT_WEIGHTS = 10
    SPLIT_INPUTS = 20
    RECOMPUTE = 30
    COMPILE = 40


class Transform(ABC):
    """One change of every model of a run."""

    name: ClassVar[str]
    """What the numbered list of steps calls it."""

    stage: ClassVar[Stage]
    """Its place among the transforms of its phase."""

    duty: ClassVar[Duty | None] = None
    """The duty that it takes; it is left out where the strategy owns that."""

    def takes_part(self, manifest: Manifest) -> bool:
        """Whether it changes models of a run with this backend. Called once, by `ordered`."""
        return self.duty not in manifest.owns

    def phase(self, manifest: Manifest) -> Phase:
        """Whether it comes before or after the strategy of the run wraps the model. Called once, by `ordered`."""
        return Phase.BEFORE

    def check(self, bundle: Bundle, context: Context) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse what cannot work; called with `Strategy.check`, before anything is touched. Must change nothing."""

    @abstractmethod
    def apply(self, model: Module, context: Context) -> Module:
        """Change a model and return what takes its place.

        Called by `prepare` for each model. Where parameters are replaced, they keep their names: the caller rebinds the
        optimizers by name.
        """

    def undo(self, model: Module) -> Module:
        """The model without this change, where it can be taken back. Called when the user's model is wanted."""
        return model


def ordered(transforms: Iterable[Transform], manifest: Manifest) -> tuple[list[Transform], list[Transform]]:
    """(transforms before the strategy, transforms after it), each in the order of application."""
    by_stage = sorted(
        (transform for transform in transforms if transform.takes_part(manifest)),
        key=lambda transform: transform.stage,
    )
    before = [transform for transform in by_stage if transform.phase(manifest) is Phase.BEFORE]
    return before, [transform for transform in by_stage if transform not in before]
