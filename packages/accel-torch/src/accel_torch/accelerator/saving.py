"""Saving and loading: checkpoints of everything, and weights alone.

What reads and writes them is imported when it is first asked for, so that making an Accelerator stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from accel_plugins.prepared import add_hook
from accel_state.hang_report.progress import PROGRESS
from accel_torch.members import AcceleratorMembers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ("SavingMixin",)


class SavingMixin(AcceleratorMembers):
    """Checkpoints."""

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedulers, scaler, generators, loader positions and registered objects.

        Called on every process. A checkpoint of the same name stays valid until the new one is complete.

        Args:
            output_dir: the folder; with automatic naming it is chosen by the project configuration.
            safe_serialization: safetensors for weights.
            async_save: return once the states are taken, and write while training goes on. At most one save is under
                way: the next one, `load_state`, `wait_for_checkpoint` and `end_training` wait for it, and raise what
                went wrong with it. It takes host memory for one copy of everything saved, kept for the next save until
                `free_memory`. Parameters that are changed outside of `optimizer.step()` have to wait for
                `wait_for_checkpoint`; where they do not, a warning names them, and the state is taken again at the
                next boundary between steps.
            save_model_func_kwargs: options of a backend that has its own way of saving models.

        Returns:
            The folder.

        Raises:
            SettingError: no folder was given and naming is not automatic, or the backend has no such options.
            CheckpointError: it could not be written; what was there before is unchanged.
            NotReady: inside an accumulation window, on a backend that does not give out partial gradients.

        Example:
            >>> for step, batch in enumerate(loader, 1):
            ...     train(batch)
            ...     if step % 1000 == 0:
            ...         accelerator.save_state(f"checkpoints/{step}", async_save=True)
            >>> accelerator.end_training()
        """
        from accel_torch.saving import save_state

        with PROGRESS.during("saving"):
            return save_state(self, output_dir, safe_serialization, async_save, save_model_func_kwargs)

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is being saved in the background any more; called on every process.

        One whose parameters changed before they were copied is taken again here.

        Raises:
            CheckpointError: the last one could not be written; those before are unchanged.
            NotReady: it has to be taken again, and cannot be inside an accumulation window on this backend.

        Example:
            >>> accelerator.save_state("checkpoint", async_save=True)
            >>> accelerator.wait_for_checkpoint()
        """
        from accel_torch.saving import wait

        with PROGRESS.during("saving"):
            wait(self)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Any = None,
        *,
        missing_ok: bool = False,
        **load_model_func_kwargs: Any,
    ) -> str | None:
        """Restore what `save_state` saved, so that the training goes on as if it had not been interrupted.

        Called on every process, after `prepare`. On a CPU the files are read into the memory that parameters and the
        states of optimizers have, so whoever holds an uncopied `state_dict` of them sees it change.

        Args:
            input_dir: the folder; with automatic naming the newest good one is taken when None, and the next automatic
                checkpoint gets a number after it.
            load_kwargs: options for loading, as a dict: `strict=False` for models; `allow_missing=("random_states",)`
                for what may be missing ("random_states", "scaler", "loaders", "custom", "extra_state");
                `weights_only=False` to let registered objects be read from any pickle, which runs the code that it
                brings.
            missing_ok: do nothing when there is no checkpoint yet, for scripts that begin and resume by the same line.
            load_model_func_kwargs: the same as `load_kwargs`, by keyword; `map_location` too.

        Returns:
            The folder that was loaded, or None.

        Raises:
            SettingError: no folder was given and naming is not automatic.
            CheckpointError: something is missing, damaged, or belongs to other objects.

        Example:
            >>> accelerator.save_state("checkpoint")
            >>> accelerator.load_state("checkpoint")
        """
        from accel_torch.loading import load_state

        with PROGRESS.during("loading"):
            return load_state(self, input_dir, {**(load_kwargs or {}), **load_model_func_kwargs}, missing_ok)

    def save_model(
        self,
        model: Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of one model for others to use; called on every process.

        Args:
            model: a prepared model, or one that is partly offloaded.
            save_directory: the folder; files there that are not weights of an earlier save stay.
            max_shard_size: largest size of one file; with several there is an index beside them.
            safe_serialization: safetensors; False writes with `torch.save`.

        Raises:
            CheckpointError: a weight has no data, or the disk refuses.

        Example:
            >>> accelerator.save_model(model, "weights", max_shard_size="2GB")
        """
        from accel_torch.weights import save_model

        with PROGRESS.during("saving"):
            save_model(self, model, save_directory, max_shard_size, safe_serialization)

    def load_weights(
        self, model: Module, weights: Mapping[str, Tensor] | str | os.PathLike[str], strict: bool = True
    ) -> None:
        """Put weights into a prepared model, such as those that `save_model` wrote; called on every process.

        Args:
            model: a prepared model.
            weights: by name in the user's model; or a file or folder of weights.
            strict: raise when names are missing, or are not those of the model.

        Raises:
            CheckpointError: they cannot be read, or are those of another model.

        Example:
            >>> accelerator.save_model(model, "best")
            >>> accelerator.load_weights(model, "best")
        """
        from accel_torch.weights import put_weights

        with PROGRESS.during("loading"):
            put_weights(self, model, weights, strict)

    def global_weights(self, model: Module) -> AbstractContextManager[None]:
        """A block in which a model has the weights of the whole run; `save_model` writes those by itself.

        They are the model's own, unless the backend lets processes train apart, as local SGD and DiLoCo do. Called on
        every process.

        Args:
            model: a prepared model.

        Example:
            >>> with accelerator.global_weights(model):
            ...     accuracy = evaluate(model)
        """
        from accel_plugins.layers import strategy_model

        return self._backend.strategy.global_weights(strategy_model(model))

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object into a file, on the main process alone (of each node with `save_on_each_node`).

        Args:
            obj: what is written; a mapping of names to tensors with `safe_serialization`.
            f: the file; what was there stays until the new one is complete.
            safe_serialization: write safetensors files instead of those of `torch.save`.

        Example:
            >>> accelerator.save({"classes": classes}, "classes.pkl")
        """
        from accel_plugins.checkpoint.pickled import save

        with PROGRESS.during("saving"):
            save(obj, f, self._options.project.save_on_each_node, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of more objects with every checkpoint.

        Raises:
            SettingError: some of them have no `state_dict` and `load_state_dict`.

        Example:
            >>> accelerator.register_for_checkpointing(average_of_weights)
            >>> accelerator.save_state("checkpoint")
        """
        self._prepared.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, weights, folder)` before a checkpoint is written; the handle returned removes it.

        Example:
            >>> def announce(models, weights, folder):
            ...     print(f"Writing {folder}.")
            >>> handle = accelerator.register_save_state_pre_hook(announce)
            >>> handle.remove()
        """
        return add_hook(self._prepared.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, folder)` before a checkpoint is read; the handle returned removes it.

        Example:
            >>> def announce(models, folder):
            ...     print(f"Reading {folder}.")
            >>> handle = accelerator.register_load_state_pre_hook(announce)
            >>> handle.remove()
        """
        return add_hook(self._prepared.load_hooks, hook)

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Tensor]:
        """All weights of a prepared model under the names of the user's model; called on every process.

        Args:
            model: a prepared model.
            unwrap: False keeps the names of the wrapper.

        Example:
            >>> weights = accelerator.get_state_dict(model)
            >>> if accelerator.should_save_model:
            ...     torch.save(weights, "weights.pt")
        """
        from accel_torch.weights import state_dict

        return state_dict(self, model, unwrap)

    @property
    def should_save_model(self) -> bool:
        """Whether this is the process that writes a model, which `get_state_dict` gives complete weights."""
        return self.state.is_main_process and self._backend.strategy.writes_weights()

    @property
    def save_iteration(self) -> int:
        """Number of the next automatic checkpoint."""
        return self._options.project.iteration
