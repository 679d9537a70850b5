"""A handler raises while a process waits for a dispatched batch: all processes get an error, and none waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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

RECEIVED = 1
"""Batches that the loops receive before."""


class Stop(RuntimeError):
    """What the handler raises."""


def stop(*_: Any) -> None:
    raise Stop("now")


def wait_until_interrupted() -> None:
    store: Any = current.process().transport.store()
    while not store.add(INTERRUPTED, 0):
        time.sleep(0.01)


class Stream(IterableDataset[Any]):
    """Numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(64))


def interrupt(received: list[Any]) -> Callable[[int], None]:
    """What to do when this process begins to wait for others: it is interrupted in its wait for a batch.

    A call that an error ends before it has sent its header is no interrupted one: it waits for the others, to refuse
    the call with them.
    """
    main = threading.main_thread().ident

    def waits(exchanges: int) -> None:
        if len(received) == RECEIVED and threading.get_ident() == main and not interrupts:
            interrupts.append(threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1)))
            interrupts[0].start()

    interrupts: list[threading.Thread] = []
    return waits


def outcome() -> Any:
    try:
        return gather(torch.tensor([PartialState().process_index])).tolist()
    except AccelError as error:
        return f"{type(error).__name__}: {error}"


def interrupted(interrupted_rank: int) -> Any:
    """The error after an interrupt of one process, while the loop of the other one is in its first step."""
    rank = PartialState(cpu=True).process_index
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=2), dispatch_batches=True, put_on_device=False)
    previous = signal.signal(signal.SIGUSR1, stop)
    if rank == interrupted_rank:
        received: list[Any] = []
        hooks = protocol_state(current.process().transport).exchange_hooks
        hooks.append(interrupt(received))
        with pytest.raises(Stop):
            received.extend(loader)
        hooks.pop()
        store: Any = current.process().transport.store()
        store.add(INTERRUPTED, 1)
    else:
        try:
            for _ in loader:
                wait_until_interrupted()
        except AccelError as error:
            signal.signal(signal.SIGUSR1, previous)
            # This process was in the loop when the other one refused its next call.
            return f"{type(error).__name__}: {error}"
    signal.signal(signal.SIGUSR1, previous)
    return outcome()


@pytest.mark.parametrize("rank", [0, 1])
def test_calls_after_an_interrupted_loader_are_refused_on_all_processes(rank: int) -> None:
    with Processes(2) as two:
        check_refused_calls(two, rank)


def check_refused_calls(two: Processes, rank: int) -> None:
    for text in two.run(interrupted, rank):
        assert text.startswith("ShapeMismatch: "), text
        assert "DataLoader.__next__() at " in text
        assert "was interrupted by Stop" in text
    # The connections are whole: the processes call the same collectives from here on.
    assert two.run(outcome) == [[0, 1]] * 2
