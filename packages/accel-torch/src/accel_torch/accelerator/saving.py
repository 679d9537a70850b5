"""The Accelerator's page about saving: checkpoints of everything, and weights alone.

What reads and writes them is imported when it is first asked for, so that making an Accelerator stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_torch.parts import Parts
from accel_torch.registry import add_hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ("SavingPage",)


class SavingPage(Parts):
    """Checkpoints."""

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> str:
        """Save models, optimizers, schedulers, scaler, generators, loader positions and registered objects.

        Called on every process. A checkpoint of the same name stays valid until the new one is complete.

        Args:
            output_dir: the folder; with automatic naming it is chosen by the project configuration.
            safe_serialization: safetensors for weights.

        Returns:
            The folder.

        Raises:
            SettingError: no folder was given and naming is not automatic.
            CheckpointError: it could not be written; what was there before is unchanged.
        """
        from accel_torch.saving import save_state

        return save_state(self, output_dir, safe_serialization)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Any = None, **options: Any
    ) -> None:
        """Restore what `save_state` saved, so that the training goes on as if it had not been interrupted.

        Called on every process, after `prepare`.

        Args:
            input_dir: the folder; with automatic naming the newest one is taken when None.
            load_kwargs: options for loading models, as a dict.
            options: the same by keyword; `strict` for example.

        Raises:
            SettingError: no folder was given and naming is not automatic.
            CheckpointError: something is missing, damaged, or belongs to other objects.
        """
        from accel_torch.saving import load_state

        load_state(self, input_dir, {**(load_kwargs or {}), **options})

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of more objects with every checkpoint.

        Raises:
            UnknownKind: one of them has no `state_dict` and `load_state_dict`.
        """
        self._registry.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, weights, folder)` before a checkpoint is written; the handle returned removes it."""
        return add_hook(self._registry.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, folder)` before a checkpoint is read; the handle returned removes it."""
        return add_hook(self._registry.load_hooks, hook)

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Tensor]:
        """All weights of a prepared model under the names of the user's model; called on every process.

        Args:
            model: a prepared model.
            unwrap: False keeps the names of the wrapper.
        """
        return self._engine.strategy.state_dict(model) if unwrap else model.state_dict()

    @property
    def should_save_model(self) -> bool:
        """Whether `get_state_dict` gives this process complete weights to write."""
        return self._engine.strategy.writes_weights()

    @property
    def save_iteration(self) -> int:
        """Number of the next automatic checkpoint."""
        return self._options.project.iteration
