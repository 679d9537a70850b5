"""Data: loaders, and what processes tell each other.

What a script may not need is imported when it is first asked for, so that making an Accelerator stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accel_data
from accel_state.labels import PREPARED
from accel_torch.members import AcceleratorMembers

__all__ = ("DataMixin",)


class DataMixin(AcceleratorMembers):
    """Loaders and collectives."""

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """The loader of this process's part of the data.

        Args:
            data_loader: a `torch.utils.data.DataLoader`.
            device_placement: whether batches are moved to the device; that of the Accelerator when None.
            slice_fn_for_dispatch: cuts a batch into the accelerator of the processes when the main process reads it.

        Example:
            >>> loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=4))
        """
        from accel_torch.prepare import prepare_loader

        return prepare_loader(self, data_loader, device_placement, slice_fn_for_dispatch)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """A loader as the backend reads it when the sequence is divided; a prepared one is that already.

        Args:
            dl: a loader.
            model: accepted for older callers and not used.

        Example:
            >>> loader = accelerator.deepspeed_ulysses_dl_adapter(loader, model)
        """
        return dl if getattr(dl, PREPARED, False) else self._backend.strategy.wrap_loader(dl)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that starts after the first `num_batches` batches of the epoch, without reading them.

        Example:
            >>> accelerator.load_state("checkpoint")
            >>> loader.set_epoch(epoch)
            >>> for batch in accelerator.skip_first_batches(loader, batches_done):
            ...     ...
        """
        return accel_data.skip_first_batches(dataloader, num_batches)

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, concatenated on their first dimension, on every process.

        Args:
            tensor: a tensor (0-d counts as one element) or any nesting of them; shapes are equal on all processes.

        Raises:
            ShapeMismatch: the processes gave different structures, shapes or dtypes.

        Example:
            >>> norms = accelerator.gather(inputs.norm(dim=1))
        """
        import accel_ops

        return accel_ops.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without the samples that were added to the last batch for evenness.

        Args:
            input_data: tensors in any nesting, or objects.
            use_gather_object: gather as objects even if there are tensors; for tensors of different shapes.

        Example:
            >>> for inputs, targets in loader:
            ...     predictions = model(inputs)
            ...     predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            ...     metric.update(predictions, targets)
        """
        from accel_torch.metrics import gather_for_metrics

        return gather_for_metrics(self.gradient_state, input_data, use_gather_object, self.state.device_mesh)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors of all processes added up or averaged, on every process.

        Args:
            tensor: a tensor or any nesting of them.
            reduction: "sum", "mean", "max", "min" or "none".
            scale: factor on the result.

        Example:
            >>> mean = accelerator.reduce(loss.detach(), "mean")
        """
        import accel_ops

        return accel_ops.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded to the largest size of all processes, so that they can be gathered.

        Args:
            tensor: a tensor or any nesting of them.
            dim: dimension that differs.
            pad_index: value of the padding.
            pad_first: pad at the beginning.

        Example:
            >>> tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
            >>> everyones = accelerator.gather(tokens)
        """
        import accel_ops

        return accel_ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a loader is cut into one part per process."""
        return self._options.loader.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads every batch and sends the others their part."""
        return self._options.loader.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last step is filled up, so that all processes have equal batches."""
        return self._options.loader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._options.loader.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle by seed and epoch alone."""
        return self._options.loader.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are read through torchdata's `StatefulDataLoader`."""
        return self._options.loader.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device overlap with what follows."""
        return self._options.loader.non_blocking
