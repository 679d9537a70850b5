"""A handler raises while a process waits for a dispatched batch: all processes get an error, and none waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader
from accel_ops import gather
from accel_state import PartialState, current
from accel_state.errors import AccelError
from accel_state.protocol.state import protocol_state
from accel_testing.processes import Processes

INTERRUPTED = "interrupted"

LATE = 12
"""The first number that comes late: the main process has read the three steps before it, each of four numbers."""

RECEIVED = 1
"""Batches that the loop receives before: the loader reads one ahead, and the main process another one."""


class Stop(RuntimeError):
    """What the handler raises."""


def stop(*_: Any) -> None:
    raise Stop("now")


def wait_until_interrupted() -> None:
    store: Any = current.process().transport.store()
    while not store.add(INTERRUPTED, 0):
        time.sleep(0.01)


class LateStream(IterableDataset[Any]):
    """Numbers; on rank 0 those after the first batches come when rank 1 has been interrupted."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(64):
            if number == LATE and PartialState().process_index == 0:
                wait_until_interrupted()
            yield torch.tensor(number)


def interrupt_the_wait_for_a_batch(received: list[Any]) -> None:
    """Send a signal to this process when it is in the call for the first batch that cannot come."""
    log = protocol_state(current.process().transport).log
    while True:
        # In this order: the batch before it has been received, so an active call is for this one.
        complete, call = len(received) == RECEIVED, log.active()
        if complete and call is not None and call.operation == "DataLoader.__next__":
            break
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)


def outcome() -> Any:
    try:
        return gather(torch.tensor([PartialState().process_index])).tolist()
    except AccelError as error:
        return f"{type(error).__name__}: {error}"


def interrupted() -> Any:
    rank = PartialState(cpu=True).process_index
    loader = prepare_data_loader(DataLoader(LateStream(), batch_size=2), dispatch_batches=True, put_on_device=False)
    previous = signal.signal(signal.SIGUSR1, stop)
    if rank == 1:
        received: list[Any] = []
        thread = threading.Thread(target=interrupt_the_wait_for_a_batch, args=(received,))
        thread.start()
        with pytest.raises(Stop):
            received.extend(loader)
        thread.join()
        store: Any = current.process().transport.store()
        store.add(INTERRUPTED, 1)
    else:
        try:
            list(loader)
        except AccelError as error:
            signal.signal(signal.SIGUSR1, previous)
            # This process was in the loop when the other one refused its next call.
            return f"{type(error).__name__}: {error}"
    signal.signal(signal.SIGUSR1, previous)
    return outcome()


def test_calls_after_an_interrupted_loader_are_refused(two: Processes) -> None:
    waiting, refused = two.run(interrupted)
    # The others wait for the rest of the interrupted call, so the process has closed its connections.
    for text in (waiting, refused):
        assert text.startswith("CollectiveError: "), text
    assert "interrupted by Stop" in refused
