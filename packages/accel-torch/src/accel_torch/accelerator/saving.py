"""Saving and loading: complete checkpoints, and weights only.

Methods import what reads and writes them at their first call, so that constructing an Accelerator stays cheap. Saves
import inside `Session.saving`, because the first one waits for the import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from accel_plugins.prepared import add_hook
from accel_state.watch.record import STATUS_RECORD
from accel_torch.accelerator.facade import Facade

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ("SavingMixin",)


class SavingMixin(Facade):
    """Checkpoints."""

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save a checkpoint from which training can resume; call it on every process.

        It contains models, optimizers, schedulers, the gradient scaler, random-number generators, DataLoader positions
        and registered objects. A checkpoint of the same name stays valid until the new one is complete.

        Args:
            output_dir: the checkpoint folder. With automatic checkpoint naming, the project configuration chooses it.
            safe_serialization: write weights as safetensors.
            async_save: copy the state, return, and write the copy while training continues, which may change
                everything. At most one save runs at a time: the next save, `load_state`, `wait_for_checkpoint` and
                `end_training` wait for it, and raise its error if it failed. The copy needs host memory for all data of
                the checkpoint, which later saves reuse until `free_memory`.
            save_model_func_kwargs: options for a backend that saves models itself, such as DeepSpeed.

        Returns:
            The checkpoint folder.

        Raises:
            SettingError: no folder was given and naming is not automatic, or the backend does not have these options.
            CheckpointError: the checkpoint could not be written; earlier checkpoints are unchanged.
            NotReady: called inside an accumulation window, and the backend cannot save partial gradients.

        Example:
            >>> for step, batch in enumerate(loader, 1):
            ...     train(batch)
            ...     if step % 1000 == 0:
            ...         accelerator.save_state(f"checkpoints/{step}", async_save=True)
            >>> accelerator.end_training()
        """
        with self.session.saving():
            from accel_torch.saving import save_state

            return save_state(self.session, output_dir, safe_serialization, async_save, save_model_func_kwargs)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint in the background is complete; call it on every process.

        Raises:
            CheckpointError: the checkpoint could not be written; earlier checkpoints are unchanged.

        Example:
            >>> accelerator.save_state("checkpoint", async_save=True)
            >>> accelerator.wait_for_checkpoint()
        """
        with self.session.saving():
            from accel_torch.saving import wait

            wait(self.session)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Any = None,
        *,
        missing_ok: bool = False,
        **load_model_func_kwargs: Any,
    ) -> str | None:
        """Restore what `save_state` saved, so that training continues as if it had not been interrupted.

        Call it on every process, after `prepare`. On a CPU the files are read into the memory of the parameters and
        optimizer states, which also changes an earlier `state_dict()` that was not copied.

        Args:
            input_dir: the checkpoint folder. None with automatic naming loads the newest valid checkpoint, and later
                automatic checkpoints continue its numbers.
            load_kwargs: options for loading, as a dict. `strict=False` accepts models with other weights.
                `allow_missing` is a tuple of contents that may be missing: "random_states", "scaler", "loaders",
                "custom" and "extra_state". `allow_unread=("models",)` loads the first models of a checkpoint that has
                more. `weights_only=False` reads registered objects from any pickle, which can run code.
            missing_ok: return None if there is no checkpoint yet, so that one line serves the first start and a resume.
            load_model_func_kwargs: the same options as keywords, and `map_location`.

        Returns:
            The folder that was loaded, or None.

        Raises:
            SettingError: no folder was given and naming is not automatic.
            CheckpointError: the checkpoint is incomplete or damaged, or does not fit the prepared objects.

        Example:
            >>> accelerator.save_state("checkpoint")
            >>> accelerator.load_state("checkpoint")
        """
        from accel_torch.loading import load_state

        with STATUS_RECORD.during("loading"):
            return load_state(self.session, input_dir, {**(load_kwargs or {}), **load_model_func_kwargs}, missing_ok)

    def save_model(
        self,
        model: Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export the weights of one model; call it on every process.

        Args:
            model: a prepared model, or a model that is partly offloaded.
            save_directory: the folder. Weights of an earlier save are replaced; other files remain.
            max_shard_size: largest size of one file, as bytes or text such as "10GB". Several files get an index file.
            safe_serialization: write safetensors; False writes with `torch.save`.

        Raises:
            CheckpointError: a weight has no data, or a file cannot be written.

        Example:
            >>> accelerator.save_model(model, "weights", max_shard_size="2GB")
        """
        with self.session.saving():
            from accel_torch.weights import save_model

            save_directory = self.session.place_to_save(save_directory)
            if self.session.saves:
                save_model(self.session, model, save_directory, max_shard_size, safe_serialization)

    def load_weights(
        self, model: Module, weights: Mapping[str, Tensor] | str | os.PathLike[str], strict: bool = True
    ) -> None:
        """Load weights into a prepared model, such as those that `save_model` wrote; call it on every process.

        Args:
            model: a prepared model.
            weights: a dict of full tensors under their original names, or a file or folder of weights.
            strict: raise an error for missing and unexpected names.

        Raises:
            CheckpointError: the weights cannot be read, or do not fit the model.

        Example:
            >>> accelerator.save_model(model, "best")
            >>> accelerator.load_weights(model, "best")
        """
        from accel_torch.weights import put_weights

        if isinstance(weights, (str, os.PathLike)):
            weights = self.session.place_to_load(weights)
        with STATUS_RECORD.during("loading"):
            put_weights(self.session, model, weights, strict)

    def global_weights(self, model: Module) -> AbstractContextManager[None]:
        """Context manager in which a model has the run's global weights, which `save_model` writes too.

        They equal the model's weights, unless the backend trains processes independently for several steps, as local
        SGD and DiLoCo do. Call it on every process.

        Args:
            model: a prepared model.

        Example:
            >>> with accelerator.global_weights(model):
            ...     accuracy = evaluate(model)
        """
        from accel_plugins.layers import strategy_model

        return self.session.strategy.global_weights(strategy_model(model))

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, on the main process only (on each local main process with `save_on_each_node`).

        Args:
            obj: the object; with `safe_serialization`, a dict of names and tensors.
            f: the file. An existing file remains valid until the new one is complete.
            safe_serialization: write safetensors; False writes with `torch.save`.

        Example:
            >>> accelerator.save({"classes": classes}, "classes.pkl")
        """
        with self.session.saving():
            from accel_plugins.checkpoint.pickled import save

            if self.session.saves:
                path = self.session.place_to_save(f)
                save(obj, path, self.session.options.project.save_on_each_node, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save the state of further objects in every checkpoint, and load it.

        Raises:
            SettingError: an object does not have `state_dict` and `load_state_dict`.

        Example:
            >>> accelerator.register_for_checkpointing(average_of_weights)
            >>> accelerator.save_state("checkpoint")
        """
        self.session.prepared.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, weights, folder)` before each checkpoint is written; the returned handle removes the hook.

        Example:
            >>> def announce(models, weights, folder):
            ...     print(f"Writing {folder}.")
            >>> handle = accelerator.register_save_state_pre_hook(announce)
            >>> handle.remove()
        """
        return add_hook(self.session.prepared.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, folder)` before each checkpoint is read; the returned handle removes the hook.

        Example:
            >>> def announce(models, folder):
            ...     print(f"Reading {folder}.")
            >>> handle = accelerator.register_load_state_pre_hook(announce)
            >>> handle.remove()
        """
        return add_hook(self.session.prepared.load_hooks, hook)

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Tensor]:
        """All weights of a prepared model as full tensors, under their original names; call it on every process.

        Args:
            model: a prepared model.
            unwrap: False uses the names of the wrapped model.

        Example:
            >>> weights = accelerator.get_state_dict(model)
            >>> if accelerator.should_save_model:
            ...     torch.save(weights, "weights.pt")
        """
        from accel_torch.weights import state_dict

        return state_dict(self.session, model, unwrap)

    @property
    def should_save_model(self) -> bool:
        """Whether this process should write the result of `get_state_dict`."""
        return self.state.is_main_process and self.session.strategy.writes_weights()

    @property
    def save_iteration(self) -> int:
        """The number of the next automatic checkpoint."""
        return self.session.options.project.iteration
