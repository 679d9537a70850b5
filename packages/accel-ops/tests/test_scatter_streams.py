"""Messages from one process to the others, over shared memory and over scatters, on real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ops import gather
from accel_ops.pending import ScatterStream, open_scatter_stream
from accel_state import PartialState, current
from accel_state.errors import CollectiveError, ShapeMismatch
from accel_state.transport.torch_dist import TorchDistTransport
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording

SIZES = (64, 64, 5000, 5000, 4096, 100_000, 16, 200_000, 200_000)


def over_shared_memory(case: Callable[..., Any], *arguments: Any) -> Any:
    return case(*arguments)


def over_scatters(case: Callable[..., Any], *arguments: Any) -> Any:
    """As between machines."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("accel_ops.shared_memory._is_offered", lambda transport: False)
        return case(*arguments)


both_ways = pytest.mark.parametrize("way", [over_shared_memory, over_scatters])


def opened(src: int = 0) -> ScatterStream:
    said, stream = open_scatter_stream(b"hello", "begin", "step", lambda tensor: tensor, src)
    assert said == b"hello"
    return stream


def send(stream: ScatterStream, nbytes: int, value: int = 0) -> None:
    for number, buffer in enumerate(stream.buffers(nbytes)):
        buffer[:nbytes] = value + number
    stream.send()


def receive(stream: ScatterStream, nbytes: int) -> list[int]:
    stream.expect(nbytes)
    values: list[int] = stream.wait()[:nbytes].unique().tolist()
    stream.release()
    return values


def sent(sizes: tuple[int, ...], src: int) -> list[list[int]]:
    """What this process receives of messages that are sent one step ahead, as a loop does."""
    rank = PartialState(cpu=True).process_index
    stream = opened(src)
    received = []
    for number, nbytes in enumerate(sizes):
        if rank != src:
            received.append(receive(stream, nbytes))
            continue
        if number == 0:
            send(stream, nbytes)
        stream.wait()
        if number + 1 < len(sizes):
            send(stream, sizes[number + 1], 10 * (number + 1))
    stream.close()
    return received


@both_ways
@pytest.mark.parametrize("src", [0, 1])
def test_messages_of_any_size_arrive_in_order(three: Processes, way: Any, src: int) -> None:
    rows = three.run(way, sent, SIZES, src)
    assert rows.pop(src) == []
    for receiver, received in enumerate(rows):
        assert received == [[10 * step + receiver] for step in range(len(SIZES))]


def traffic(steps: int) -> tuple[int, int]:
    """The collectives of an epoch, and the bytes that are sent on sockets of Python."""
    PartialState(cpu=True)
    with pytest.MonkeyPatch.context() as monkeypatch, recording() as records:
        sends = []
        original = socket.socket.send
        monkeypatch.setattr(socket.socket, "send", lambda one, data: sends.append(data) or original(one, data))
        sent((1000,) * steps, 0)
    return len(records), len(sends)


def test_a_step_is_no_collective_but_a_byte_each_way(four: Processes) -> None:
    short, long = four.run(traffic, 5), four.run(traffic, 12)
    assert [collectives for collectives, _ in short] == [collectives for collectives, _ in long] == [2] * 4
    assert [after[1] - before[1] for before, after in zip(short, long, strict=True)] == [3 * 7, 7, 7, 7]


def calls_alone(rank_that_calls: int) -> str:
    rank = PartialState(cpu=True).process_index
    stream = opened()
    if rank == 0:
        send(stream, 64)
        stream.wait()
    else:
        receive(stream, 64)

    def go_on() -> None:
        for _ in range(3):
            send(stream, 64)
            stream.wait()

    mine = [go_on, lambda: receive(stream, 64)][rank]
    with pytest.raises(ShapeMismatch) as caught:
        gather(torch.ones(1)) if rank == rank_that_calls else mine()
    assert gather(torch.tensor([rank])).tolist() == [0, 1]
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_calls_something_else_in_the_loop_is_named(two: Processes, rank: int) -> None:
    first, second = two.run(calls_alone, rank)
    assert first == second
    assert re.search(rf"gather\(\) at \S*test_scatter_streams.py:\d+ on rank {rank}", first), first
    assert re.search(rf"step\(\) at \S*test_scatter_streams.py:\d+ on rank {1 - rank}", first), first


def takes_fewer() -> str:
    rank = PartialState(cpu=True).process_index
    stream = opened()
    store = current.process_or_start().transport.store()
    assert store is not None
    if rank == 0:
        for _ in range(2):
            send(stream, 64)
            stream.wait()
        store.set("both steps are made", b"")
    else:
        receive(stream, 64)
        # Before it leaves the stream, which would end the other's second step.
        store.wait(["both steps are made"])
    stream.close()
    with pytest.raises(ShapeMismatch) as caught:
        gather(torch.ones(1))
    assert gather(torch.tensor([rank])).tolist() == [0, 1]
    return str(caught.value)


def test_processes_at_different_steps_are_named_at_the_next_collective(two: Processes) -> None:
    first, second = two.run(takes_fewer)
    assert first == second
    assert "the processes are at different steps of a loader" in first
    assert "2 on rank 0, 1 on rank 1" in first


def left_open() -> int:
    """How much shared memory streams leave open that were read to their ends, or left before."""
    PartialState(cpu=True)
    before = len(shared_memory())
    for _ in range(3):
        sent((64, 5000), 0)
        stream = opened()
        assert len(shared_memory()) > before
        stream.close()
    # Other tests in this process leave theirs to the collector of garbage.
    return max(len(shared_memory()) - before, 0)


def shared_memory() -> list[Path]:
    links = Path("/proc/self/fd").iterdir()
    return [link for link in links if link.is_symlink() and "memfd:accel" in str(link.readlink())]


def test_a_stream_leaves_nothing_open(two: Processes) -> None:
    assert two.run(left_open) == [0, 0]


def of_another_user() -> list[list[int]]:
    rank = PartialState(cpu=True).process_index
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:
            monkeypatch.setattr(os, "getuid", lambda: 1_000_000)
        with recording() as records:
            received = sent((64, 64), 0)
    assert sum(record.operation == "scatter" for record in records) == 2
    return received


def test_processes_that_cannot_share_memory_use_scatters(two: Processes) -> None:
    assert two.run(of_another_user)[1] == [[0], [10]]


def dies(rank_that_dies: int) -> None:
    rank = PartialState(cpu=True).process_index
    stream = opened()
    for step in range(100):
        if step == 2 and rank == rank_that_dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            send(stream, 64)
            stream.wait()
        else:
            receive(stream, 64)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_leaves_nobody_waiting(two: Processes, rank: int) -> None:
    survivor = two.outcomes(dies, rank)[1 - rank]
    assert survivor.error is not None
    assert "CollectiveError" in survivor.error


def source_is_late() -> list[int]:
    """The source sends its message only when the other process has handled a signal while it waits."""
    state = PartialState(cpu=True)
    stream, store = opened(), current.process().transport.store()
    assert store is not None
    if state.process_index == 0:
        store.get("handled")
        send(stream, 64)
        stream.wait()
        return []
    previous = signal.signal(signal.SIGALRM, lambda *_: store.set("handled", ""))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    values = receive(stream, 64)
    signal.signal(signal.SIGALRM, previous)
    return values


def test_signals_are_handled_while_a_process_waits(two: Processes) -> None:
    assert two.run(source_is_late) == [[], [0]]


def source_is_too_late() -> str:
    PartialState(cpu=True)
    process = current.process()
    # Only the message is awaited for so short a time, not the other process.
    short = TorchDistTransport(process.device, timedelta(seconds=5), process.transport.store())
    with current.replace_process(process._replace(transport=short)):
        stream, store = opened(), process.transport.store()
        assert store is not None
        if process.rank == 0:
            store.get("given up")
            return ""
        with pytest.raises(CollectiveError) as caught:
            receive(stream, 64)
        store.set("given up", "")
        return str(caught.value)


def test_a_message_that_does_not_come_in_time_is_an_error(two: Processes) -> None:
    text = two.run(source_is_too_late)[1]
    assert re.search(r"Cannot complete step\(\) at \S*test_scatter_streams.py:\d+ \(call \d+\) on rank 1", text), text
    assert re.search(r"ank 0 is in source_is_too_late|ank 0 .*test_scatter_streams.py", text), text
