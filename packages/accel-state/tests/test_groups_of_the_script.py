"""A default process group that the script made is followed, whatever its backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_state import PartialState, current
from accel_state.protocol.call import HeaderCall
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.threads import run_as_threads


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


@pytest.mark.parametrize("store", [FakeStore, dist.HashStore])  # type: ignore[attr-defined]
def test_state_of_a_rank_in_a_fake_process_group(store: Callable[[], Any]) -> None:
    dist.init_process_group("fake", rank=5, world_size=1024, store=store())
    state = PartialState(cpu=True)
    assert (state.process_index, state.num_processes, state.local_process_index) == (5, 1024, 5)
    assert state.backend == "fake"
    state.wait_for_everyone()
    assert current.process().transport.store() is None


def own_group(backend: str) -> tuple[str | None, int, int, list[bytes]]:
    """What a process is in a group that it made without telling its place in the environment."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    store = dist.TCPStore(host, port, size, is_master=rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group(backend, rank=rank, world_size=size, store=store)
    state = PartialState(cpu=True)
    return state.backend, state.process_index, state.local_process_index, exchanged(state)


def exchanged(state: PartialState) -> list[bytes]:
    with HeaderCall(current.process().transport, "test") as call:
        received: list[bytes] = call.all_gather_bytes(b"from %d" % state.process_index)
        return received


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_ranks_follow_a_group_without_variables_of_a_launcher(two: Processes, backend: str) -> None:
    both = [b"from 0", b"from 1"]
    assert two.run(own_group, backend) == [(backend, 0, 0, both), (backend, 1, 1, both)]


def without_a_store() -> tuple[list[bytes], dict[str, bytes]]:
    """The messages of all processes where the group came without a store, as those of MPI do."""
    before = dist.distributed_c10d._get_default_store
    dist.init_process_group("gloo")
    dist.distributed_c10d._get_default_store = lambda: None  # type: ignore[assignment, return-value]
    try:
        state = PartialState(cpu=True)
    finally:
        dist.distributed_c10d._get_default_store = before
    control = current.process().transport.control()
    assert control is not None
    control.set(f"note/{state.process_index}", b"%d" % state.process_index, 20)
    heard = control.receive(["note/0", "note/1"], 20)
    state.wait_for_everyone()
    return exchanged(state), heard


def test_a_group_without_a_store_gets_one(two: Processes) -> None:
    heard = {"note/0": b"0", "note/1": b"1"}
    assert two.run(without_a_store) == [([b"from 0", b"from 1"], heard)] * 2


def threaded() -> tuple[str | None, list[bytes]]:
    state = PartialState(cpu=True)
    return state.backend, exchanged(state)


def test_state_of_a_rank_in_a_threaded_process_group() -> None:
    assert run_as_threads(3, threaded) == [("threaded", [b"from 0", b"from 1", b"from 2"])] * 3
