"""A process that is forked after a state was made: workers may read it, launched processes are told, nobody hangs."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel_state import PartialState, current, get_logger
from accel_state.devices.select import family_of
from accel_state.errors import NotReady
from accel_state.transport.shutdown import keep_garbage_at_forks
from accel_testing.processes import Processes, run_command
from accel_testing.simulated_device import NAME, POSSIBLE, simulated_device

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_child(function: Callable[[], Any]) -> Any:
    """Call a function in a forked child and return what it returned, or raise what it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = pickle.dumps((function(), None))
        except NotReady as error:
            answer = pickle.dumps((None, error))
        except BaseException:
            answer = pickle.dumps((None, RuntimeError(traceback.format_exc())))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        value, error = pickle.load(pipe)
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return value


def become_one_of_two() -> None:
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", FORK_LAUNCHED="1")


def state_made_before_the_launch() -> list[str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    PartialState(cpu=True)
    refused = []
    for ask in (PartialState, current.process, current.process_or_start, lambda: PartialState(cpu=True).num_processes):

        def launched(ask: Callable[[], Any] = ask) -> Any:
            become_one_of_two()
            return ask()

        with pytest.raises(NotReady) as caught:
            in_child(launched)
        refused.append(str(caught.value))
    assert PartialState().num_processes == 1
    return refused


def test_a_state_created_before_the_fork_is_refused_in_a_launched_process(one: Processes) -> None:
    (refused,) = one.run(state_made_before_the_launch)
    for message in refused:
        assert "Rank 0 of 1 created it before this process was forked" in message
        assert "in the function that is launched" in message


def state_made_in_the_child() -> tuple[int, bool]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)

    def launched() -> tuple[int, bool]:
        os.environ["FORK_LAUNCHED"] = "1"
        state = PartialState(cpu=True)
        return state.num_processes, state.fork_launched

    found: tuple[int, bool] = in_child(launched)
    return found


def test_a_state_created_in_the_launched_process_works(one: Processes) -> None:
    assert one.run(state_made_in_the_child) == [(1, True)]


def worker_of_a_rank() -> tuple[int, int, str]:
    state = PartialState(cpu=True)

    def worker() -> tuple[int, int]:
        get_logger("accel.test.worker").debug("read in a worker", main_process_only=False)
        return PartialState().process_index, state.num_processes

    def collective() -> None:
        PartialState().wait_for_everyone()

    index, count = in_child(worker)
    with pytest.raises(NotReady) as caught:
        in_child(collective)
    total = torch.ones(1)
    current.process().transport.all_reduce(total).wait()
    return index, count, f"{total.item()} {caught.value}"


def test_a_dataloader_worker_reads_its_rank_and_cannot_call_collectives(two: Processes) -> None:
    for rank, (index, count, told) in enumerate(two.run(worker_of_a_rank)):
        assert (index, count) == (rank, 2)
        assert told.startswith("2.0 Cannot call a collective in a process that was forked")


def device_opened_before_the_fork() -> str:
    with simulated_device():
        module: Any = family_of(NAME).module
        module._is_in_bad_fork = lambda: True
        try:
            with pytest.raises(NotReady) as caught:
                PartialState()
        finally:
            del module._is_in_bad_fork
        return str(caught.value)


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")
def test_a_device_that_does_not_survive_the_fork_is_named(one: Processes) -> None:
    (told,) = one.run(device_opened_before_the_fork)
    assert f"Cannot use {NAME} devices in a forked process" in told
    assert "use the device only in the function that is launched" in told


class Connection:
    """Stands for what waits for threads of its process when it ends."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ended.append(os.getpid())


ended: list[int] = []


def garbage_left_to_a_child() -> list[int]:
    keep_garbage_at_forks()
    gc.collect()
    gc.disable()
    Connection()

    def collect() -> list[int]:
        gc.collect()
        return ended

    in_the_child = in_child(collect)
    gc.enable()
    gc.collect()
    assert ended == [os.getpid()]
    return in_the_child


def test_a_child_does_not_end_what_its_parent_left_to_be_collected(one: Processes) -> None:
    assert one.run(garbage_left_to_a_child) == [[]]


FORKED_AFTER_A_HOOK_THAT_ALLOCATES = """
import gc, os, sys
from accel_state.transport.shutdown import keep_garbage_at_forks

os.register_at_fork(after_in_child=lambda: [[] for _ in range(50_000)])
keep_garbage_at_forks()
ended = []

class Connection:
    def __init__(self):
        self.itself = self
    def __del__(self):
        ended.append(os.getpid())

collects = sys.argv[1] == "True"
if not collects:
    gc.disable()
Connection()
child = os.fork()
gc.collect()
if child == 0:
    os._exit(0 if (ended, gc.isenabled()) == ([], collects) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (ended, gc.isenabled()) == ([os.getpid()], collects)
"""


@pytest.mark.parametrize("collects", [True, False])
def test_no_hook_of_a_child_collects_what_its_parent_left(collects: bool) -> None:
    finished = run_command([sys.executable, "-c", FORKED_AFTER_A_HOOK_THAT_ALLOCATES, str(collects)])
    assert finished.returncode == 0, finished.stderr


def forked_by_several_threads() -> bool:
    keep_garbage_at_forks()

    def fork_often() -> None:
        for _ in range(20):
            in_child(lambda: None)

    threads = [threading.Thread(target=fork_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gc.isenabled()


def test_garbage_collection_continues_after_forks_of_several_threads(one: Processes) -> None:
    assert one.run(forked_by_several_threads) == [True]
