"""Data: DataLoaders, and collectives between processes.

Methods import what not every script needs at their first call, so that constructing an Accelerator stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accel_data
from accel_state.labels import PREPARED
from accel_torch.accelerator.facade import Facade

__all__ = ("DataMixin",)


class DataMixin(Facade):
    """DataLoaders and collectives."""

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one DataLoader, which then yields this process's shard of the data.

        Args:
            data_loader: a `torch.utils.data.DataLoader`.
            device_placement: whether to move batches to the device. None uses the Accelerator's setting.
            slice_fn_for_dispatch: the function that takes a process's shard from a global batch, for
                `dispatch_batches=True`.

        Example:
            >>> loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=4))
        """
        from accel_torch.prepare import prepare_loader

        return prepare_loader(self.session, data_loader, device_placement, slice_fn_for_dispatch)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Wrap a DataLoader for sequence parallelism; one that `prepare` returned is returned unchanged.

        Args:
            dl: a DataLoader.
            model: not used; accepted for compatibility.

        Example:
            >>> loader = accelerator.deepspeed_ulysses_dl_adapter(loader, model)
        """
        return dl if getattr(dl, PREPARED, False) else self.session.strategy.wrap_loader(dl)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A DataLoader that starts after the first `num_batches` batches of the epoch, without reading them.

        Example:
            >>> accelerator.load_state("checkpoint")
            >>> loader.set_epoch(epoch)
            >>> for batch in accelerator.skip_first_batches(loader, batches_done):
            ...     ...
        """
        return accel_data.skip_first_batches(dataloader, num_batches)

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along their first dimension; every process receives the result.

        Args:
            tensor: a tensor or a pytree of tensors, with equal shapes on all processes. A 0-d tensor counts as shape
                (1,).

        Raises:
            ShapeMismatch: pytrees, shapes or dtypes differ between processes.

        Example:
            >>> norms = accelerator.gather(inputs.norm(dim=1))
        """
        import accel_ops

        return accel_ops.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, but without the samples that `even_batches` added to the last batch.

        Args:
            input_data: a pytree of tensors, or picklable objects.
            use_gather_object: pickle tensors too, which allows different shapes.

        Example:
            >>> for inputs, targets in loader:
            ...     predictions = model(inputs)
            ...     predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            ...     metric.update(predictions, targets)
        """
        from accel_torch.metrics import gather_for_metrics

        return gather_for_metrics(self.session.gradient, input_data, use_gather_object, self.state.device_mesh)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce the tensors of all processes element by element; every process receives the result.

        Args:
            tensor: a tensor or a pytree of tensors, with equal shapes on all processes.
            reduction: "sum", "mean", "max", "min" or "none".
            scale: multiplies the result.

        Example:
            >>> mean = accelerator.reduce(loss.detach(), "mean")
        """
        import accel_ops

        return accel_ops.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size on any process, so that they can be gathered.

        Args:
            tensor: a tensor or a pytree of tensors.
            dim: the dimension whose size differs.
            pad_index: the value of added elements.
            pad_first: pad at the start instead of the end.

        Example:
            >>> tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
            >>> everyones = accelerator.gather(tokens)
        """
        import accel_ops

        return accel_ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a DataLoader is split into one shard per process."""
        return self.session.options.loader.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads each global batch and sends the other processes their shards."""
        return self.session.options.loader.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated in the last global batch, so that all processes have batches of equal size."""
        return self.session.options.loader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.session.options.loader.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of shuffled samples depends on seed and epoch only."""
        return self.session.options.loader.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether DataLoaders are converted to torchdata's `StatefulDataLoader`."""
        return self.session.options.loader.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device are asynchronous."""
        return self.session.options.loader.non_blocking
