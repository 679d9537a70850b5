"""A transport that records which collectives are started, for tests that count them.

For example:

    with recording() as records:
        gather(batch)
    assert [record.operation for record in records] == ["all_gather"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_state import current
from accel_state.transport.base import Reduction, Transport, Work

if TYPE_CHECKING:
    from accel_state.transport.control import ControlStore

__all__ = ("Record", "RecordingTransport", "recording")


class Record(NamedTuple):
    """One collective that was started.

    Args:
        operation: name of the transport's method.
        nbytes: bytes that this process passed.
    """

    operation: str
    nbytes: int


class RecordingTransport(Transport):
    """Forwards every call to another transport and records it.

    It has no connections of its own, so that its calls continue the log of the other one.

    Args:
        inner: the transport that does the work.
        records: where calls are recorded; a new list by default.

    Attributes:
        records: the collectives that were started so far, also those of groups.
    """

    def __init__(self, inner: Transport, records: list[Record] | None = None) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.device, self.timeout = inner.device, inner.timeout
        self.ranks, self.group = inner.ranks, inner.group
        self.records: list[Record] = [] if records is None else records
        self._groups: dict[Transport, Transport] = {}

    def _record(self, operation: str, *sent: torch.Tensor) -> None:
        self.records.append(Record(operation, sum(tensor.nbytes for tensor in sent)))

    @property
    def connected(self) -> Transport:
        return self.inner.connected

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        inner = self.inner.subgroup(group, label, meet)
        if inner not in self._groups:
            self._groups[inner] = RecordingTransport(inner, self.records)
        return self._groups[inner]

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        self._record("all_gather", tensor)
        return self.inner.all_gather(output, tensor, header=header)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        self._record("all_reduce", tensor)
        return self.inner.all_reduce(tensor, op, into)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        self._record("broadcast", tensor)
        return self.inner.broadcast(tensor, src)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        self._record("scatter", *(inputs or ()))
        return self.inner.scatter(output, inputs, src)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        self._record("gather", tensor)
        return self.inner.gather(outputs, tensor, dst)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        self._record("all_to_all", tensor)
        return self.inner.all_to_all(output, tensor)

    def barrier(self) -> None:
        self._record("barrier")
        self.inner.barrier()

    def abort(self) -> None:
        self.inner.abort()

    def store(self) -> Any | None:
        return self.inner.store()

    def control(self) -> ControlStore | None:
        return self.inner.control()

    def in_child(self) -> Transport:
        return self.inner.in_child()


@contextmanager
def recording() -> Iterator[list[Record]]:
    """Record the collectives that this process starts on its transport inside the block."""
    process = current.process_or_start()
    transport = RecordingTransport(process.transport)
    with current.replace_process(process._replace(transport=transport)):
        yield transport.records
