"""A transport that records which collectives are started, for tests that count them.

For example:

    with recording() as records:
        gather(batch)
    assert [record.operation for record in records] == ["all_gather"]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from accel_state import current
from accel_state.transport.base import Transport
from accel_state.transport.forwarding import ForwardingTransport

__all__ = ("Record", "RecordingTransport", "recording")


class Record(NamedTuple):
    """One collective that was started.

    Args:
        operation: name of the transport's method.
        nbytes: bytes that this process passed.
    """

    operation: str
    nbytes: int


class RecordingTransport(ForwardingTransport):
    """Forwards every call to another transport and records it.

    Args:
        inner: the transport that does the work.

    Attributes:
        records: the collectives that were started so far, also those of groups.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.records: list[Record] = []

    def around(self, inner: Transport) -> RecordingTransport:
        other = RecordingTransport(inner)
        other.records = self.records
        return other

    def before(self, operation: str, *sent: torch.Tensor) -> None:
        self.records.append(Record(operation, sum(tensor.nbytes for tensor in sent)))


@contextmanager
def recording() -> Iterator[list[Record]]:
    """Record the collectives that this process starts on its transport inside the block."""
    process = current.process_or_start()
    transport = RecordingTransport(process.transport)
    with current.replace_process(process._replace(transport=transport)):
        yield transport.records
