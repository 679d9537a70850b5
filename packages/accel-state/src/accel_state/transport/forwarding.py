"""A transport that forwards to another one, for classes that observe or measure collectives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_state.transport.base import Reduction, Transport, Work

if TYPE_CHECKING:
    from accel_state.transport.control import ControlStore

__all__ = ("ForwardingTransport",)


class ForwardingTransport(Transport):
    """Forwards every call to another transport; a subclass overrides `before` or `started` to observe them.

    It has no connections of its own, so that its calls continue the log of the other one.

    Args:
        inner: the transport that does the work.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.device, self.timeout = inner.device, inner.timeout
        self.ranks, self.group = inner.ranks, inner.group
        self._groups: dict[Transport, Transport] = {}

    @abstractmethod
    def around(self, inner: Transport) -> Transport:
        """An object like this one that forwards to the transport of a group."""

    def before(self, operation: str, *sent: torch.Tensor) -> None:
        """Called before a collective starts.

        Args:
            operation: name of the method of `Transport`.
            sent: the tensors of this process.
        """

    def started(self, work: Work) -> Work:
        """Called with a collective that was started; returns what the caller waits for."""
        return work

    @property
    def connected(self) -> Transport:
        return self.inner.connected

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        inner = self.inner.subgroup(group, label, meet)
        if inner not in self._groups:
            self._groups[inner] = self.around(inner)
        return self._groups[inner]

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        self.before("all_gather", tensor)
        return self.started(self.inner.all_gather(output, tensor, header=header))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        self.before("all_reduce", tensor)
        return self.started(self.inner.all_reduce(tensor, op, into))

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        self.before("broadcast", tensor)
        return self.started(self.inner.broadcast(tensor, src))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        self.before("scatter", *(inputs or ()))
        return self.started(self.inner.scatter(output, inputs, src))

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        self.before("gather", tensor)
        return self.started(self.inner.gather(outputs, tensor, dst))

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        self.before("all_to_all", tensor)
        return self.started(self.inner.all_to_all(output, tensor))

    def barrier(self) -> None:
        self.before("barrier")
        self.inner.barrier()

    def abort(self) -> None:
        self.inner.abort()

    def store(self) -> Any | None:
        return self.inner.store()

    def control(self) -> ControlStore | None:
        return self.inner.control()

    def in_child(self) -> Transport:
        return self.inner.in_child()
