"""The interface of a transport: the few collectives on which everything above is built.

A call starts a collective and returns at once; `wait` on the result completes it. All processes of a run make the same
calls in the same order with the same sizes; the layer above checks this before it calls. Two transports need no
connection: the transport of a single process, and the transport of a process that was forked from one of several.
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
        """Block until it is complete; raise its error. After a timeout the caller may wait again."""

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error; distinguishes a failure from an interrupted wait."""


class Done:
    """A collective that was complete when it was started."""

    __slots__ = ()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True: the collective was complete when it was started."""
        return True


DONE = Done()


class Transport(ABC):
    """Collectives between the processes of a run, on separate process groups.

    Attributes:
        rank: index of this process among those that the transport connects.
        world_size: number of processes that it connects.
        device: device of the tensors that the data collectives take.
        timeout: how long a collective may take.
        group: name of these processes in messages, such as "the group 'tp'"; empty for all processes of the run.
        ranks: their ranks in the run.
        scope: prefix that `store` adds to keys.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout: timedelta
    group: str = ""
    ranks: Sequence[int] = ()
    scope: str = ""
    _control: ControlStore | None = None

    @property
    def connected(self) -> Transport:
        """The transport that has the connections: this one, unless it forwards to another."""
        return self

    def rank_in_run(self, index: int) -> int:
        """Rank in the run of the process with this index in the transport."""
        return self.ranks[index] if self.ranks else index

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        """The transport between the processes of a torch process group that contains this process; created once.

        Args:
            group: the process group.
            label: its name in messages.
            meet: called before the processes connect; returns when all of them have called it.

        Raises:
            NotOffered: the transport of this run does not support groups.
        """
        raise NotOffered(
            f"Cannot run a collective in {label}.",
            f"The transport of this run, {type(self).__name__}, does not support groups of processes.",
            "Omit `group`.",
        )

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        """Collect `tensor` of every process by rank in `output`, which has `world_size * tensor.numel()` elements.

        Both are contiguous. With `header` both are CPU tensors, whatever `device` is.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        """Reduce `tensor` of all processes on every process, in place or into `into` of the same shape and dtype."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        """Overwrite `tensor` in place with that of process `src`."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        """Send each process its element of the `inputs` of process `src`; the others pass None."""

    @abstractmethod
    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        """Send `tensor` of every process to process `dst`, which passes one output per rank."""

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

        It does not check that the others call the same; `accel_state.protocol.call.barrier` does, and runs use that
        once they have begun.
        """

    def abort(self) -> None:  # noqa: B027 - not every backend can do this
        """Close the connections, so that processes which wait for this one get an error at once.

        By default they wait until their timeout.
        """

    def shutdown(self) -> None:  # noqa: B027 - most transports have nothing to end
        """End the connections and their threads; called before the interpreter ends."""

    @abstractmethod
    def store(self) -> Any | None:
        """The key-value store that the processes share; None with a single process or with simulated ones."""

    def control(self) -> ControlStore | None:
        """The control messages between the processes: one object for each process, or None without a store."""
        store = self.store()
        if self._control is None and store is not None:
            # Imports torch.distributed, which a single process does not need.
            from accel_state.transport.control import ControlStore

            self._control = ControlStore(store, self.rank, self.scope)
        return self._control

    def in_child(self) -> Transport:
        """The transport for a process that was just forked from this one."""
        return self


class LocalTransport(Transport):
    """The transport of a single process, or of the only process of a group: every collective is a copy.

    Args:
        device: device of the tensors of this process.
        rank: rank of this process in the run.
        group: name of its group in messages, if the run has more processes.
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

    The parent continues to use its connections; a second process that wrote to them would corrupt the data.

    Args:
        rank: index of the parent.
        world_size: number of processes.
        device: device of the parent.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout = timedelta(0)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotReady(
            f"Cannot call a collective in a process that was forked from process {self.rank} of {self.world_size}.",
            "Its connections belong to the parent process.",
            "Call collectives only in the processes that the launcher started, not in those that they fork (such as "
            "DataLoader workers).",
        )

    subgroup = all_gather = all_reduce = broadcast = scatter = gather = barrier = store = _refuse
