"""The interface of a transport: the few collectives that everything above is built from.

Calls start a collective and return at once; `wait` on the result makes it complete. Every process of the run makes the
same calls in the same order. Sizes must be equal on all processes: the layer above checks them before it calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

if TYPE_CHECKING:
    from accel_state.transport.control import ControlStore

__all__ = ("DONE", "Done", "Reduction", "Transport", "Work")

Reduction = Literal["sum", "product", "max", "min"]


class Work(Protocol):
    """A collective that was started."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until it is complete; raises what went wrong. After a timeout it may be waited for again."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; tells a failure from a wait that was cut short."""


class Done:
    """A collective that was complete when it was started."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


DONE = Done()


class Transport(ABC):
    """Collectives between the processes of a run, on process groups that nobody else uses.

    Attributes:
        rank: index of this process.
        world_size: number of processes.
        device: where tensors must lie for the data collectives.
        timeout: how long a collective may take.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout: timedelta

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        """Collect `tensor` of every process into `output`, which holds `world_size * tensor.numel()` elements, by rank.

        Both are contiguous. With `header` both lie on the CPU, whatever `device` is.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, operation: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        """Combine `tensor` of all processes, on every one; in place, or in `into`, which is like it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Overwrite `tensor` with that of process `source`, in place."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, source: int) -> Work:
        """Give each process its own of the `inputs` that process `source` holds; the others pass None."""

    @abstractmethod
    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, destination: int) -> Work:
        """Bring `tensor` of every process to process `destination`, which passes one output per rank."""

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Send row r of `tensor` to process r, and receive a row of each process into `output`, by rank.

        Both are contiguous, of shape (world_size, ...).
        """
        everything = tensor.new_empty(self.world_size, *tensor.shape)
        self.all_gather(everything.view(-1), tensor.view(-1)).wait()
        output.copy_(everything[:, self.rank])
        return DONE

    @abstractmethod
    def barrier(self) -> None:
        """Return when every process has called this.

        Nothing checks that the others do: `accel_state.protocol.call.meet` does, and is what a run calls once it has
        begun.
        """

    @abstractmethod
    def store(self) -> Any | None:
        """The key-value store that the processes share; None when there is only one, or the others are simulated."""

    def control(self) -> ControlStore | None:
        """A new connection for control messages between the processes, or None when there is no store."""
        # Loads torch.distributed, which a process alone does without.
        from accel_state.transport.control import ControlStore

        store = self.store()
        return None if store is None else ControlStore(store, self.rank)

    @abstractmethod
    def close(self) -> None:
        """End the groups of this transport; no call may follow."""

    def in_child(self) -> Transport:
        """The transport of a process that was just forked from this one."""
        return self
