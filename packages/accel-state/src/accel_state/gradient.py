"""Gradient accumulation: its configuration, and the state that says whether this micro-batch synchronises gradients.

Each Accelerator has a `GradientState` of its own and passes it to the loaders, optimizers and schedulers it prepares.
`GradientState()` returns the newest one, for code without access to the Accelerator.
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
        num_steps: micro-batches per optimizer step; None uses `gradient_accumulation_steps` and its variable.
        adjust_scheduler: step the scheduler at every micro-batch, for a schedule that was not written for accumulation.
        sync_with_dataloader: step at the end of the loader even after fewer micro-batches.
        sync_each_batch: reduce gradients between processes at every micro-batch, which takes less memory.

    Raises:
        SettingError: `num_steps` is not an int of at least 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        steps = self.num_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise SettingError(
                f"Cannot accumulate gradients over {steps!r} steps.",
                "The number of steps must be an int of at least 1.",
                "Give 1 to step at every batch.",
            )


class Iterating(Protocol):
    """A loader in iteration, as gradient accumulation sees it."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the newest batch is the last one."""

    @property
    def remainder(self) -> int:
        """Number of samples of the last global batch without padding; -1 when there is no padding."""


class GradientState:
    """Whether this micro-batch synchronises gradients, and which loaders are in iteration.

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
        """A new state for one Accelerator, which `GradientState()` returns from now on."""
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
        """Another object with the same state, for objects that outlive the Accelerator."""
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__
        return other

    def __copy__(self) -> GradientState:
        return self.shared()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientState:
        return self.shared()

    def __reduce__(self) -> Any:
        # An unpickled object belongs to no Accelerator; it is the newest state of the process that reads it.
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
        """Add a loader that begins to iterate; it becomes the innermost one."""
        self.loaders.append(loader)
        self.left = None

    def finish(self, loader: Iterating) -> None:
        """Remove a loader that has stopped to iterate.

        Raises:
            NotReady: it was not in iteration.
        """
        for index in range(len(self.loaders) - 1, -1, -1):
            if self.loaders[index] is loader:
                del self.loaders[index]
                return
        raise NotReady(
            "Cannot end the iteration of a loader.",
            "The loader is not iterated over.",
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
        """Whether the innermost loader has yielded its last batch; False outside of loaders."""
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples of the innermost loader's last global batch without padding; -1 outside of loaders."""
        return self.loaders[-1].remainder if self.loaders else -1

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Called by transformers before each micro-batch, because it counts them itself."""
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
