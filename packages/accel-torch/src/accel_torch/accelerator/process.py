"""Processes: who am I, who goes first, who does what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from accel_torch.members import AcceleratorMembers

if TYPE_CHECKING:
    import torch

    from accel_plugins.precision.config import FP8BackendType
    from accel_state.labels import DistributedType

__all__ = ("ProcessMixin",)

F = TypeVar("F", bound=Callable[..., Any])


class ProcessMixin(AcceleratorMembers):
    """Processes and devices."""

    @property
    def device(self) -> torch.device:
        """Where this process works."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of the run."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """Number of all processes."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """Index of this process among all."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """Index of this process on its node."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether several processes work on a device of their own each; a CPU is shared."""
        return self.state.use_distributed and self.state.device.index is not None

    @property
    def mixed_precision(self) -> str:
        """Precision mode: "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8 bits; `FP8BackendType.NO` when none does."""
        from accel_plugins.precision.config import FP8BackendType

        return self._backend.precision.library or FP8BackendType.NO

    def wait_for_everyone(self) -> None:
        """Return when every process has called this.

        Example:
            >>> accelerator.save_model(model, "weights")
            >>> accelerator.wait_for_everyone()
        """
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the first process of each node.

        Example:
            >>> accelerator.print(f"Epoch {epoch} begins.")
        """
        self.state.print(*args, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process run a block first, for example to fill a cache that the others then read.

        Example:
            >>> with accelerator.main_process_first():
            ...     data = load_and_cache()
        """
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each node run a block first.

        Example:
            >>> with accelerator.local_main_process_first():
            ...     data = load_and_cache()
        """
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """The part of a list, tuple, dict or tensor for this process.

        Args:
            inputs: what is to be split.
            apply_padding: repeat the last item until all processes have equally many, so that results can be gathered.

        Example:
            >>> with accelerator.split_between_processes(["a dog", "a cat", "a fish"]) as prompts:
            ...     answers = [answer(prompt) for prompt in prompts]
        """
        return self.state.split_between_processes(inputs, apply_padding)

    def set_trigger(self) -> None:
        """Raise a flag on this process; `check_trigger` tells all processes.

        Example:
            >>> if loss.isnan():
            ...     accelerator.set_trigger()
            >>> if accelerator.check_trigger():
            ...     accelerator.save_state("interrupted")
        """
        import torch

        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process raised the flag since the last check; called on every process, and lowers it on all.

        Example:
            >>> if accelerator.check_trigger():
            ...     accelerator.save_state("interrupted")
        """
        import torch

        # Collectives are a dozen modules that a script without triggers may not need.
        from accel_ops import reduce

        lowered = torch.tensor(0, device=self.device)
        raised = lowered if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = lowered
        return bool(reduce(raised, "sum").item() >= 1)

    def check_breakpoint(self) -> bool:
        """The same as `check_trigger`.

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
        """Decorator: run the function on the main process only; elsewhere it returns None.

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
        """Decorator: run the function on the first process of each node only.

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
        """Decorator: run the function on the process with this index only.

        Example:
            >>> @accelerator.on_process(process_index=0)
            ... def report(text):
            ...     print(text)
            >>> report("The first process is here.")
        """
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on the process with this index on its node only.

        Example:
            >>> @accelerator.on_local_process(local_process_index=0)
            ... def report(text):
            ...     print(text)
            >>> report("The first process of this node is here.")
        """
        return self.state.on_local_process(function, local_process_index)
