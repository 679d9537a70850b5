"""The interface of a transform: a change of the model that works with any strategy, such as tensor parallelism.

Users pass transforms to the Accelerator; `ordered` sorts them into the order of application.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from accel_plugins.manifest import Manifest

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context

__all__ = ("Stage", "Transform", "ordered")


class Stage(IntEnum):
    """The order of transforms: those that split weights are first, those that compile are last."""

    SPLIT_WEIGHTS = 10
    """Replaces parameters by shards, as tensor parallelism does."""
    SPLIT_INPUTS = 20
    """Divides inputs over processes, as sharding of the sequence does."""
    RECOMPUTE = 30
    """Computes activations again in backward."""
    COMPILE = 40
    """Compiles the model or its blocks."""


class Transform(ABC):
    """A change of every model of a run."""

    name: ClassVar[str]
    """The name of its step in the log."""

    stage: ClassVar[Stage]
    """Its position among the transforms before the strategy, or after it."""

    def takes_part(self, manifest: Manifest) -> bool:
        """Whether it applies to models of a run with this backend. Called once, by `ordered`."""
        return True

    def before_wrap(self, manifest: Manifest) -> bool:
        """Whether it is applied before the strategy wraps the model, otherwise after. Called once, by `ordered`."""
        return True

    def check(self, bundle: Bundle, context: Context) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise if it cannot be applied. Called after `Strategy.check`; must not change the bundle."""

    @abstractmethod
    def apply(self, model: Module, context: Context) -> Module:
        """Change a model in place, or return one that replaces it.

        Called by `prepare` for each model. Replaced parameters must keep their names, because the caller updates the
        optimizers by name.
        """

    def undo(self, model: Module) -> Module:
        """Return the model without this change, if it can be undone. Called by `unwrap_model`."""
        return model


def ordered(transforms: Iterable[Transform], manifest: Manifest) -> tuple[list[Transform], list[Transform]]:
    """(transforms before the strategy, transforms after it), each in the order of application."""
    by_stage = sorted(
        (transform for transform in transforms if transform.takes_part(manifest)),
        key=lambda transform: transform.stage,
    )
    before = [transform for transform in by_stage if transform.before_wrap(manifest)]
    return before, [transform for transform in by_stage if transform not in before]
