"""Processes of the run: ranks, the order of blocks, and functions that only some processes run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from accel_torch.accelerator.facade import Facade

if TYPE_CHECKING:
    import torch

    from accel_plugins.precision.config import FP8BackendType
    from accel_state.labels import DistributedType

__all__ = ("ProcessMixin",)

F = TypeVar("F", bound=Callable[..., Any])


class ProcessMixin(Facade):
    """Processes and devices.

    Attributes:
        flag_tensor: the flag of `set_trigger`, on the device: 1 if this process has set it; None before the first use.
    """

    flag_tensor: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device on which this process trains."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is distributed, for example `DistributedType.MULTI_GPU`."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """The world size: the number of processes of the run."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The local rank of this process: its number on its node."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process (rank 0)."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the local main process (local rank 0)."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether the run has several processes."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether the run has several processes with one device each; False on CPUs, which processes share."""
        import torch

        # The setting may give a CPU an index, which tensors there do not have.
        return self.state.use_distributed and torch.empty(0, device=self.state.device).device.index is not None

    @property
    def mixed_precision(self) -> str:
        """Precision mode: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8, or `FP8BackendType.NO`."""
        from accel_plugins.precision.config import FP8BackendType

        return self.session.precision.library or FP8BackendType.NO

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this method: a barrier.

        Example:
            >>> accelerator.save_model(model, "weights")
            >>> accelerator.wait_for_everyone()
        """
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call `print` on the local main process of each node only.

        Example:
            >>> accelerator.print(f"Epoch {epoch} begins.")
        """
        self.state.print(*args, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager that the main process runs before the others, for example to fill a cache that they read.

        Example:
            >>> with accelerator.main_process_first():
            ...     data = load_and_cache()
        """
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Context manager that the local main process of each node runs before the others of its node.

        Example:
            >>> with accelerator.local_main_process_first():
            ...     data = load_and_cache()
        """
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Context manager that returns this process's shard of a list, tuple, dict or tensor.

        Args:
            inputs: the object to split. Each value of a dict is split.
            apply_padding: repeat the last item so that all processes have equally many and results can be gathered.

        Example:
            >>> with accelerator.split_between_processes(["a dog", "a cat", "a fish"]) as prompts:
            ...     answers = [answer(prompt) for prompt in prompts]
        """
        return self.state.split_between_processes(inputs, apply_padding)

    def set_trigger(self) -> None:
        """Set a flag on this process, which `check_trigger` reports to all processes.

        Example:
            >>> if loss.isnan():
            ...     accelerator.set_trigger()
            >>> if accelerator.check_trigger():
            ...     accelerator.save_state("interrupted")
        """
        import torch

        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process called `set_trigger` since the last check. Call it on every process; it resets the flag.

        Example:
            >>> if accelerator.check_trigger():
            ...     accelerator.save_state("interrupted")
        """
        import torch

        # Collectives import a dozen modules that a script without triggers may not need.
        from accel_ops import reduce

        lowered = torch.tensor(0, device=self.device)
        raised = lowered if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = lowered
        return bool(reduce(raised, "sum").item() >= 1)

    def check_breakpoint(self) -> bool:
        """An alias of `check_trigger`.

        Example:
            >>> if accelerator.check_breakpoint():
            ...     accelerator.save_state("interrupted")
        """
        return self.check_trigger()

    @overload
    def on_main_process(self, function: F) -> F: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[F], F]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorator: run the function on the main process only; on other processes it returns None.

        Example:
            >>> @accelerator.on_main_process
            ... def report(text):
            ...     print(text)
            >>> report("The training begins.")
        """
        return self.state.on_main_process(function)

    @overload
    def on_local_main_process(self, function: F) -> F: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[F], F]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorator: run the function on the local main process of each node only.

        Example:
            >>> @accelerator.on_local_main_process
            ... def report(text):
            ...     print(text)
            >>> report("The training begins on this node.")
        """
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: F) -> F:
        """Decorator: run the function on the last process only.

        Example:
            >>> @accelerator.on_last_process
            ... def report(text):
            ...     print(text)
            >>> report("The last process is here.")
        """
        return self.state.on_last_process(function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: run the function on the process with this rank only.

        Example:
            >>> @accelerator.on_process(process_index=0)
            ... def report(text):
            ...     print(text)
            >>> report("The first process is here.")
        """
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on the process with this local rank on each node only.

        Example:
            >>> @accelerator.on_local_process(local_process_index=0)
            ... def report(text):
            ...     print(text)
            >>> report("The first process of this node is here.")
        """
        return self.state.on_local_process(function, local_process_index)
