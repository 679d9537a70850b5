"""Gradient accumulation: its configuration, and whether the current micro-batch synchronises gradients.

Each Accelerator has its own `GradientState` and passes it to the loaders, optimizers and schedulers that it prepares.
`GradientState()` returns the newest one, for code without access to the Accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from accel_state import current
from accel_state.creation import run_creation_hooks
from accel_state.current import SharedState
from accel_state.errors import NotReady, SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.integers import as_int

__all__ = ("GradientAccumulationPlugin", "GradientState", "Iterating")


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Args:
        num_steps: micro-batches per optimizer step; None uses `gradient_accumulation_steps` and its variable.
        adjust_scheduler: has no effect, and has none in the original: a prepared scheduler steps with its optimizers.
        sync_with_dataloader: step at the end of the loader, even after fewer micro-batches.
        sync_each_batch: reduce gradients between processes at every micro-batch, which takes less memory.

    Raises:
        SettingError: `num_steps` is not an int of at least 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        steps = as_int(self.num_steps)
        if self.num_steps is not None and (steps is None or steps < 1):
            raise SettingError(
                f"Cannot accumulate gradients over {self.num_steps!r} steps.",
                "The number of steps must be an int of at least 1.",
                "Use 1 to step at every batch.",
            )
        self.num_steps = steps


class Iterating(Protocol):
    """The properties of a loader that gradient accumulation reads."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the newest batch is the last one."""

    @property
    def remainder(self) -> int:
        """Number of samples of the last global batch without padding; -1 when there is no padding."""


def _content() -> dict[str, Any]:
    state = current.gradient()
    if state is None:
        return {}
    return {
        "sync_gradients": state.sync_gradients,
        "plugin_kwargs": state.plugin_kwargs,
        "_dataloader_references_ref": state.dataloader_references,
        "_is_xla_gradients_synced": state.is_xla_gradients_synced,
    }


class GradientState:
    """Whether this micro-batch synchronises gradients, and which loaders are being iterated.

    Objects that share one state do not keep each other alive.
    """

    sync_gradients: bool
    plugin: GradientAccumulationPlugin
    loaders: list[Iterating]
    is_xla_gradients_synced: bool = False
    _left: Callable[[], Iterating | None]
    _shared_state = SharedState(_content, partial(current.set_gradient, None))

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        run_creation_hooks()
        existing: GradientState | None = current.gradient()
        if existing is None:
            existing = cls._create(gradient_accumulation_plugin or GradientAccumulationPlugin())
            current.set_gradient(existing)
        elif gradient_accumulation_plugin is not None:
            existing.plugin = gradient_accumulation_plugin
        return existing.shared()

    @classmethod
    def of(cls, plugin: GradientAccumulationPlugin) -> GradientState:
        """A new state for one Accelerator, which `GradientState()` returns from now on."""
        state = cls._create(plugin)
        current.set_gradient(state)
        return state.shared()

    @classmethod
    def _create(cls, plugin: GradientAccumulationPlugin) -> GradientState:
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
        """The loader that the script stopped iterating at its last batch, for example after `next(iter(loader))`.

        Results of that batch can still be collected until the next iteration begins or the loader is deleted.
        """
        return self._left()

    @left.setter
    def left(self, loader: Iterating | None) -> None:
        self._left = _nothing if loader is None else weakref.ref(loader)

    @property
    def initialized(self) -> bool:
        """Always True, because a state is initialised when it is created."""
        return True

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """False: no scheduler moves within a window of micro-batches."""
        return False

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window of micro-batches."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are reduced after each micro-batch, not only after the last of a window."""
        return self.plugin.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The fields of the plugin that differ from their defaults."""
        return self.plugin.to_kwargs()

    def begin(self, loader: Iterating) -> None:
        """Add a loader at the start of its iteration; it becomes the current one."""
        self.loaders.append(loader)
        self.left = None

    def follow(self, loader: Iterating) -> None:
        """Make a loader that is being iterated the current one, because it yields a batch.

        An iterator that a script advances by hand may stay open in the loop over another loader.
        """
        self._remove(loader)
        self.loaders.append(loader)

    def finish(self, loader: Iterating) -> None:
        """Remove a loader at the end of its iteration.

        Raises:
            NotReady: the loader was not being iterated.
        """
        self._remove(loader)

    def _remove(self, loader: Iterating) -> None:
        for index in range(len(self.loaders) - 1, -1, -1):
            if self.loaders[index] is loader:
                del self.loaders[index]
                return
        raise NotReady(
            "Cannot end the iteration of a loader.",
            "The loader is not being iterated.",
            "Call begin(loader) before finish(loader).",
        )

    @property
    def active_dataloader(self) -> Iterating | None:
        """The loader that yielded last among those that are being iterated."""
        return self.loaders[-1] if self.loaders else None

    @property
    def dataloader_references(self) -> list[Iterating | None]:
        """None, then the loaders that are being iterated; the one that yielded last is the last."""
        return [None, *self.loaders]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current loader has yielded its last batch; False outside of loaders."""
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples of the current loader's last global batch without padding; -1 outside of loaders."""
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
        """Register a loader of another library, which calls this when an iteration begins."""
        self.begin(dataloader)

    def _remove_dataloader(self, dataloader: Iterating) -> None:
        """Unregister a loader of another library, which calls this when its iteration has ended."""
        self.finish(dataloader)

    @staticmethod
    def _reset_state() -> None:
        current.set_gradient(None)


def _nothing() -> None:
    return None
