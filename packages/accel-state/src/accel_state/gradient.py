"""Gradient accumulation: its configuration, and the one object that says whether gradients are synchronised now.

Each Accelerator has a `GradientState` of its own and hands it to the loaders, optimizers and schedulers it prepares;
`GradientState()` shows the one made last, for code that has no Accelerator at hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from accel_state import current
from accel_state.errors import NotReady, SettingError
from accel_state.kwargs import KwargsHandler

__all__ = ("GradientAccumulationPlugin", "GradientState", "Iterating")


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Args:
        num_steps: micro-batches whose gradients are added up before the optimizer steps; None leaves it to
            `gradient_accumulation_steps` and its variable.
        adjust_scheduler: step the scheduler at micro-batches too, when the schedule was not written for accumulation.
        sync_with_dataloader: step at the end of the loader even if fewer micro-batches were accumulated.
        sync_each_batch: reduce gradients between processes at every micro-batch, which takes less memory.

    Raises:
        SettingError: `num_steps` is not a whole number of at least 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        steps = self.num_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise SettingError(
                f"Gradient accumulation over {steps!r} steps was asked for.",
                "It has to be a whole number of at least 1.",
                "Give 1 to step at every batch.",
            )


class Iterating(Protocol):
    """A loader in iteration, as far as accumulation needs to know it."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that was given out last is the last one."""

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are no padding; -1 when nothing has to be trimmed."""


class GradientState:
    """Whether gradients are synchronised at this step, and which loaders are in iteration.

    Objects that share one state do not keep each other alive.
    """

    sync_gradients: bool
    plugin: GradientAccumulationPlugin
    loaders: list[Iterating]
    is_xla_gradients_synced: bool = False
    _left: Callable[[], Iterating | None]

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        existing: GradientState | None = current.gradient()
        if existing is None:
            existing = cls._made(gradient_accumulation_plugin or GradientAccumulationPlugin())
            current.set_gradient(existing)
        elif gradient_accumulation_plugin is not None:
            existing.plugin = gradient_accumulation_plugin
        return existing.shared()

    @classmethod
    def of(cls, plugin: GradientAccumulationPlugin) -> GradientState:
        """A state of its own for one Accelerator; it becomes what `GradientState()` shows."""
        state = cls._made(plugin)
        current.set_gradient(state)
        return state.shared()

    @classmethod
    def _made(cls, plugin: GradientAccumulationPlugin) -> GradientState:
        state = object.__new__(cls)
        state.sync_gradients = True
        state.plugin = plugin
        state.loaders = []
        state.left = None
        return state

    def shared(self) -> GradientState:
        """Another object with this very state, for what outlives the Accelerator."""
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__
        return other

    def __copy__(self) -> GradientState:
        return self.shared()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientState:
        return self.shared()

    def __reduce__(self) -> Any:
        # What was pickled belongs to no Accelerator any more and follows the one at hand.
        return GradientState, ()

    @property
    def left(self) -> Iterating | None:
        """The loader whose iteration was left at its last batch, as `next(iter(loader))` may do.

        Results of that batch can still be collected, until the next iteration begins or the loader is gone.
        """
        return self._left()

    @left.setter
    def left(self, loader: Iterating | None) -> None:
        self._left = _nothing if loader is None else weakref.ref(loader)

    @property
    def initialized(self) -> bool:
        """True: a state that can be reached is initialised."""
        return True

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self.plugin.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The fields of the plugin that differ from their defaults."""
        return self.plugin.to_kwargs()

    def begin(self, loader: Iterating) -> None:
        """A loader enters iteration and is the innermost one from now on."""
        self.loaders.append(loader)
        self.left = None

    def finish(self, loader: Iterating) -> None:
        """A loader leaves iteration.

        Raises:
            NotReady: it was not in iteration.
        """
        for index in range(len(self.loaders) - 1, -1, -1):
            if self.loaders[index] is loader:
                del self.loaders[index]
                return
        raise NotReady(
            "A loader was reported to have left iteration.",
            "It had not been reported to be in iteration.",
            "Call begin(loader) before finish(loader).",
        )

    @property
    def active_dataloader(self) -> Iterating | None:
        """The innermost loader in iteration."""
        return self.loaders[-1] if self.loaders else None

    @property
    def dataloader_references(self) -> list[Iterating | None]:
        """None, then the loaders in iteration, innermost last."""
        return [None, *self.loaders]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is in iteration."""
        return bool(self.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the innermost loader has given out its last batch; False outside of loaders."""
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the innermost loader's last global batch that are no padding; -1 outside of loaders."""
        return self.loaders[-1].remainder if self.loaders else -1

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """What transformers calls before each micro-batch, because it counts them itself."""
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Iterating) -> None:
        """`begin`, for loaders that libraries write themselves."""
        self.begin(dataloader)

    def _remove_dataloader(self, dataloader: Iterating) -> None:
        """`finish`, for loaders that libraries write themselves."""
        self.finish(dataloader)

    @staticmethod
    def _reset_state() -> None:
        current.set_gradient(None)


def _nothing() -> None:
    return None
