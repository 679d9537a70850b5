"""The interface of a transport: the few collectives that everything above is built from.

A call starts a collective and returns at once; `wait` on the result completes it. All processes of a run make the same
calls in the same order, with the same sizes: the layer above checks this before it calls. Two transports need no
connection: that of a process that runs alone, and that of a process that was forked from one of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import torch

from accel_state.errors import NotOffered, NotReady

if TYPE_CHECKING:
    from accel_state.transport.control import ControlStore

__all__ = ("DONE", "Done", "ForkedTransport", "LocalTransport", "Reduction", "Transport", "Work")

Reduction = Literal["sum", "product", "max", "min"]


class Work(Protocol):
    """A collective that was started."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until it is complete; raises what went wrong. After a timeout the caller may wait again."""

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error; tells a failure from a wait that was cut short."""


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
    """Collectives between the processes of a run, on process groups of their own.

    Attributes:
        rank: index of this process among those that the transport connects.
        world_size: number of processes that it connects.
        device: of the tensors that the data collectives take.
        timeout: how long a collective may take.
        group: what messages call these processes, such as "the group 'tp'"; empty when they are all of the run.
        ranks: their ranks in the run.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout: timedelta
    group: str = ""
    ranks: Sequence[int] = ()

    def rank_in_run(self, index: int) -> int:
        """Rank in the run of a process that the transport connects."""
        return self.ranks[index] if self.ranks else index

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        """The transport between the processes of a process group of torch, one of which is this; made once.

        Args:
            group: the process group.
            label: its name in messages.
            meet: called before the processes connect; returns when all of them have called it.

        Raises:
            NotOffered: the processes of this run have no transport between some of them.
        """
        raise NotOffered(
            f"Cannot run a collective in {label}.",
            f"The transport of this run, {type(self).__name__}, does not support groups of processes.",
            "Leave out group.",
        )

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        """Collect `tensor` of every process into `output`, which holds `world_size * tensor.numel()` elements, by rank.

        Both are contiguous. With `header` both are CPU tensors, whatever `device` is.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        """Combine `tensor` of all processes, on every one; in place, or in `into`, which is like it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        """Overwrite `tensor` with that of process `src`, in place."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        """Give each process its own of the `inputs` of process `src`; the others pass None."""

    @abstractmethod
    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        """Bring `tensor` of every process to process `dst`, which passes one output per rank."""

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

        Nothing checks that the others call the same: `accel_state.protocol.barrier` does, and is what a run calls once
        it has begun.
        """

    @abstractmethod
    def store(self) -> Any | None:
        """The key-value store that the processes share; None with a single process or with simulated ones."""

    def control(self) -> ControlStore | None:
        """A new connection for control messages between the processes, or None when there is no store."""
        # Loads torch.distributed, which a process alone does without.
        from accel_state.transport.control import ControlStore

        store = self.store()
        return None if store is None else ControlStore(store, self.rank)

    def in_child(self) -> Transport:
        """The transport of a process that was just forked from this one."""
        return self


class LocalTransport(Transport):
    """The transport of a process that runs alone, or is alone in its group: every collective is a copy.

    Args:
        device: of the tensors of this process.
        rank: of this process in the run.
        group: its group in messages, where the run has more processes.
    """

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device, rank: int = 0, group: str = "") -> None:
        self.device = device
        self.timeout = timedelta(0)
        self.ranks = (rank,)
        self.group = group

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        return self

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        output.view(-1).copy_(tensor.reshape(-1))
        return DONE

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        if into is not None:
            into.copy_(tensor)
        return DONE

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return DONE

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        assert inputs is not None
        output.copy_(inputs[0])
        return DONE

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        assert outputs is not None
        outputs[0].copy_(tensor)
        return DONE

    def barrier(self) -> None:
        """Return at once: there is no other process."""

    def store(self) -> Any | None:
        return None

    def control(self) -> None:
        return None


class ForkedTransport(Transport):
    """The transport of a process that was forked from one of several: it refuses every collective.

    The parent goes on using its connections; a second process that wrote to them would destroy its data.

    Args:
        rank: index of the parent.
        world_size: number of processes.
        device: that of the parent.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout = timedelta(0)

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotReady(
            f"Cannot call a collective in a process that was forked from process {self.rank} of {self.world_size}.",
            "Its connections belong to the parent.",
            "Call collectives in the processes that the launcher started, not in those that they fork (such as the "
            "workers of a DataLoader).",
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        self._refuse()

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        self._refuse()

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        self._refuse()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        self._refuse()

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        self._refuse()

    def barrier(self) -> None:
        self._refuse()

    def store(self) -> Any | None:
        self._refuse()
