"""Calls that a signal interrupts, calls inside calls, and calls of several threads: no process gets a wrong value."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accel_ops import (
    all_to_all,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
    scatter_object,
)
from accel_ops.collectives import async_all_gather_bytes
from accel_ops.rng import synchronize_rng_states
from accel_state import PartialState, current
from accel_state.errors import AccelError, CollectiveError, NotReady, ShapeMismatch
from accel_state.process import wait_for_everyone
from accel_state.protocol import exchange
from accel_state.protocol.call import HeaderCall
from accel_state.protocol.exchange import HeaderExchange
from accel_state.protocol.state import protocol_state
from accel_state.protocol.turn import Turn, is_raised_by_handler
from accel_state.watch.calls import CallLog
from accel_testing.processes import Processes

LARGE = 200_000
"""Elements of a tensor that does not fit into a header."""


def handle_signals_soon() -> None:
    """In this process, give Python control often while it waits; each test waits until it handles a signal."""
    mock.patch.object(exchange, "_WAIT_SLICE", timedelta(milliseconds=20)).start()


@pytest.fixture(scope="module")
def two(processes: Callable[[int], Processes]) -> Processes:
    processes(2).run(handle_signals_soon)
    return processes(2)


@pytest.fixture(scope="module")
def three(processes: Callable[[int], Processes]) -> Processes:
    processes(3).run(handle_signals_soon)
    return processes(3)


class Stop(RuntimeError):
    """What a handler raises; backends raise errors of its base class."""


def stop(*_: Any) -> None:
    raise Stop("now")


def stop_once(*_: Any) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise Stop("now")


def stop_without_arguments(signum: int, frame: Any) -> None:
    del signum, frame
    raise Stop("now")


def stop_in(part: str, signum: int, frame: Any) -> None:
    raise Stop(part)


def stop_as_a_collective(*_: Any) -> None:
    raise CollectiveError("Cannot save.", "Rank 1 did not answer.", "Try again.")


class Stopping:
    """A handler that is an object."""

    def __call__(self, *_: Any) -> None:
        raise Stop("now")


def store() -> Any:
    found = current.process().transport.store()
    assert found is not None
    return found


def tell(event: str) -> None:
    store().add(event, 1)


def wait_until(event: str, count: int = 1) -> None:
    while store().add(event, 0) < count:
        time.sleep(0.01)


def is_waiting() -> Callable[[], bool]:
    """Whether this process has begun to wait for the headers of others since this function was called."""
    log = protocol_state(current.process().transport).log
    before = log.exchanges
    return lambda: log.exchanges > before


@contextmanager
def signalled_in_a_call(handler: Any) -> Iterator[None]:
    """Send a signal to this process when it waits for the headers of other ranks, then tell the other ranks."""
    previous, waiting = signal.signal(signal.SIGUSR1, handler), is_waiting()

    def send() -> None:
        while not waiting():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, previous)


def outcome_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AccelError as error:
        return f"{type(error).__name__}: {error}"


def scattered(value: int, src: int) -> Any:
    state = PartialState()
    mine = scatter_object([torch.tensor([value])] * state.num_processes if state.process_index == src else None, src)
    return mine.tolist()


OPERATIONS: dict[str, Callable[[int], Any]] = {
    "gather": lambda value: gather(torch.tensor([value])).tolist(),
    "reduce": lambda value: reduce(torch.tensor([float(value)]), "sum").tolist(),
    "broadcast": lambda value: broadcast(torch.tensor([value])).tolist(),
    "gather_object": lambda value: gather_object([value]),
    "broadcast_object_list": lambda value: broadcast_object_list([value]),
    "scatter_object": lambda value: scattered(value, 0),
    "scatter_object from the last rank": lambda value: scattered(value, PartialState().num_processes - 1),
    "pad_across_processes": lambda value: pad_across_processes(torch.ones(value % 5 + 1)).shape[0],
    "wait_for_everyone": lambda value: wait_for_everyone(),
    "synchronize_rng_states": lambda value: synchronize_rng_states(["torch"]),
    "async_all_gather_bytes": lambda value: async_all_gather_bytes(b"%d" % value, "accumulate").wait(),
}


def refused(operation: str = "gather") -> str:
    with pytest.raises(ShapeMismatch) as raised:
        OPERATIONS[operation](7)
    return str(raised.value)


def interrupted(operation: str, handler: Any, interruption: type[BaseException]) -> list[str]:
    """Rank 0 is interrupted in its call before the others enter it; the next call is refused on all."""
    state = PartialState(cpu=True)
    assert OPERATIONS["gather"](state.process_index) == list(range(state.num_processes))
    if state.is_main_process:
        with signalled_in_a_call(handler), pytest.raises(interruption):
            OPERATIONS[operation](1)
        tell("interrupted")
    else:
        wait_until("interrupted")
        OPERATIONS[operation](1)
    messages = [refused("gather_object")]
    for value in range(3):
        assert OPERATIONS["gather"](10 * value + state.process_index) == [
            10 * value + rank for rank in range(state.num_processes)
        ]
    return messages


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_call_after_an_interrupted_one_is_refused_on_all(two: Processes, operation: str) -> None:
    messages = two.run(interrupted, operation, signal.default_int_handler, KeyboardInterrupt)
    assert len({str(message) for message in messages}) == 1
    assert "was interrupted by KeyboardInterrupt" in messages[0][0]
    assert "versions" not in messages[0][0]


@pytest.mark.parametrize("operation", ["gather", "gather_object"])
def test_an_error_of_a_handler_is_not_taken_for_one_of_the_backend(two: Processes, operation: str) -> None:
    messages = two.run(interrupted, operation, stop, Stop)
    assert all("was interrupted by Stop" in message[0] for message in messages)


HANDLERS: dict[str, Any] = {
    "resets itself": stop_once,
    "deletes its arguments": stop_without_arguments,
    "partial": functools.partial(stop_in, "data"),
    "object": Stopping(),
    "method": Stopping().__call__,
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_an_error_of_every_kind_of_handler_is_told_from_others(handler: str) -> None:
    previous = signal.signal(signal.SIGUSR1, HANDLERS[handler])
    try:
        with pytest.raises(Stop) as raised:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert is_raised_by_handler(raised.value)
        with pytest.raises(Stop) as raised:
            HANDLERS[handler](signal.SIGUSR1, None)
        assert is_raised_by_handler(raised.value) == (handler == "deletes its arguments")
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("handler", HANDLERS)
def test_every_kind_of_handler_interrupts(two: Processes, handler: str) -> None:
    messages = two.run(interrupted, "gather", HANDLERS[handler], Stop)
    assert all("was interrupted by Stop" in message[0] for message in messages)


def test_an_error_of_a_handler_is_not_taken_for_one_that_all_have(two: Processes) -> None:
    messages = two.run(interrupted, "gather", stop_as_a_collective, CollectiveError)
    assert all("was interrupted by CollectiveError" in message[0] for message in messages)


def interrupted_with_a_pending_call(operation: str, times: int) -> tuple[list[Any], list[int], list[bytes]]:
    """Rank 0 is interrupted in calls that complete a pending one first."""
    state = PartialState(cpu=True)
    wait_for_everyone()
    outcomes: list[Any] = []
    if state.is_main_process:
        pending = async_all_gather_bytes(b"0", "DataLoader.__next__")
        for value in range(times):
            with signalled_in_a_call(stop), pytest.raises(Stop):
                OPERATIONS[operation](value)
        tell("interrupted")
    else:
        wait_until("interrupted")
        pending = async_all_gather_bytes(b"1", "DataLoader.__next__")
        outcomes = [outcome_of(functools.partial(OPERATIONS[operation], value)) for value in range(times)]
    outcomes.append(refused())
    values = [value for step in range(3) for value in gather(torch.tensor([10 * step + state.process_index])).tolist()]
    return outcomes, values, pending.wait()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_while_a_pending_call_completes_shifts_no_call(two: Processes, operation: str, times: int) -> None:
    (first, values, received), (second, others, too) = two.run(interrupted_with_a_pending_call, operation, times)
    assert "was interrupted by Stop" in first[0]
    assert second[-1] == first[0]
    # A pending call was sent before its process waited for it.
    expected = [[b"0", b"0"]] if operation == "async_all_gather_bytes" else []
    assert all("was interrupted by Stop" in str(outcome) for outcome in second[len(expected) :]), second
    assert values == others == [0, 1, 10, 11, 20, 21]
    assert received == too == [b"0", b"1"]


def differs_with_a_pending_call() -> tuple[list[Any], list[int]]:
    """As above, but the pending calls differ, so that nobody sends the header of the interrupted call."""
    state = PartialState(cpu=True)
    wait_for_everyone()
    outcomes = []
    if state.is_main_process:
        async_all_gather_bytes(b"0", "DataLoader.__next__")
        with signalled_in_a_call(stop), pytest.raises(Stop):
            gather(torch.tensor([0]))
        tell("interrupted")
    else:
        wait_until("interrupted")
        async_all_gather_bytes(b"1", "accumulate")
        outcomes.append(outcome_of(lambda: gather(torch.tensor([1])).tolist()))
    outcomes.append(refused())
    return outcomes, gather(torch.tensor([10 + state.process_index])).tolist()


def test_an_interrupt_before_a_pending_call_that_differs_shifts_no_call(two: Processes) -> None:
    (first, values), (second, others) = two.run(differs_with_a_pending_call)
    assert "called different collectives" in second[0]
    assert "was interrupted by Stop" in first[0]
    assert first[0] == second[1]
    assert values == others == [10, 11]


def test_three_processes_refuse_together(three: Processes) -> None:
    assert len({message[0] for message in three.run(interrupted, "gather", stop, Stop)}) == 1


def interrupted_twice() -> tuple[str, list[int]]:
    """Rank 0 is interrupted again in the call that would be refused: both are calls of the others too."""
    state = PartialState(cpu=True)
    if state.is_main_process:
        for _ in range(2):
            with signalled_in_a_call(stop), pytest.raises(Stop):
                gather(torch.tensor([0]))
        tell("interrupted")
        message = refused()
    else:
        wait_until("interrupted")
        assert gather(torch.tensor([1])).tolist() == [0, 1]
        assert "was interrupted by Stop" in refused()
        message = refused()
    return message, gather(torch.tensor([state.process_index])).tolist()


def test_an_interrupt_of_the_refused_call_is_not_lost(two: Processes) -> None:
    (first, values), (second, others) = two.run(interrupted_twice)
    assert "was interrupted by Stop" in first
    assert first == second
    assert values == others == [0, 1]


FUNCTIONS: dict[str, Any] = {
    "begin": Turn.begin,
    "name": Turn.thread_name,
    "enter": CallLog.enter,
    "exit": HeaderCall.__exit__,
    "end": Turn.end,
    "mismatch": HeaderExchange._mismatch,
}
"""Functions of a call at whose beginning Python may handle a signal."""


@contextmanager
def stopped_at(function: str) -> Iterator[None]:
    """Stop at the beginning of a function of a call, as by a signal that Python handles there."""

    def trace(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code is FUNCTIONS[function].__code__:
            sys.settrace(None)
            raise Stop

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(Stop):
            yield
    finally:
        sys.settrace(tracing)


def interrupted_at(function: str) -> tuple[list[Any], list[int]]:
    """Rank 0 is interrupted at the beginning of a function of its call."""
    state = PartialState(cpu=True)
    wait_for_everyone()
    outcomes = []
    if state.is_main_process:
        with stopped_at(function):
            # Other shapes than those of rank 1 differ.
            gather(torch.zeros(2 if function == "mismatch" else 1, dtype=torch.int64))
    else:
        outcomes.append(outcome_of(lambda: gather(torch.tensor([1])).tolist()))
    outcomes.append(refused())
    return outcomes, gather(torch.tensor([10 + state.process_index])).tolist()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_call_may_be_interrupted_at_its_begin_and_end(two: Processes, function: str) -> None:
    (first, values), (second, others) = two.run(interrupted_at, function)
    assert "was interrupted by" in first[0]
    assert second[-1] == first[0]
    assert second[0] == [0, 1] or "was interrupted by" in second[0]
    assert values == others == [10, 11]


def a_pending_call_stops_at_its_mismatch(waits: bool) -> tuple[list[Any], list[int]]:
    """Rank 0 is interrupted when it sees that a pending call differs, in `wait` or in another call."""
    state = PartialState(cpu=True)
    wait_for_everyone()
    outcomes = []
    pending = async_all_gather_bytes(b"", "accumulate" if state.is_main_process else "DataLoader.__next__")

    def complete() -> Any:
        return pending.wait() if waits else gather(torch.tensor([1])).tolist()

    if state.is_main_process:
        with stopped_at("mismatch"):
            complete()
    else:
        outcomes.append(outcome_of(complete))
    outcomes += [refused(), outcome_of(pending.wait)]
    return outcomes, gather(torch.tensor([10 + state.process_index])).tolist()


@pytest.mark.parametrize("waits", [True, False])
def test_a_pending_call_may_be_interrupted_when_it_differs(two: Processes, waits: bool) -> None:
    (first, values), (second, others) = two.run(a_pending_call_stops_at_its_mismatch, waits)
    assert "was interrupted by Stop" in first[0]
    assert "was interrupted by Stop" in first[1]
    assert "was interrupted by Stop" in second[0]
    assert second[1:] == [first[0], second[0]]
    assert values == others == [10, 11]


class StoppingOnce:
    """A handler that raises when it is called first."""

    def __init__(self) -> None:
        self.was_called = threading.Event()

    def __call__(self, *_: Any) -> None:
        if not self.was_called.is_set():
            self.was_called.set()
            raise Stop("now")


def send_in(function: Any, handler: StoppingOnce) -> None:
    """Send signals to this process while its main thread is in a function, until the handler was called.

    One is not enough: a signal that comes just before the thread waits for a lock does not end that wait.
    """
    main = threading.main_thread().ident
    while not handler.was_called.wait(0.01):
        if sys._current_frames()[main].f_code is function.__code__:  # type: ignore[index]
            os.kill(os.getpid(), signal.SIGUSR1)


def interrupted_while_another_thread_calls() -> tuple[list[Any], list[int]]:
    """Rank 0 is interrupted while it waits for the call of another thread to end."""
    state = PartialState(cpu=True)
    wait_for_everyone()
    outcomes: list[Any] = []

    def in_thread() -> None:
        outcomes.append(outcome_of(lambda: gather_object([state.process_index])))

    thread = threading.Thread(target=in_thread, name="background")
    if state.is_main_process:
        waiting = is_waiting()
        thread.start()
        while not waiting():
            time.sleep(0.01)
        handler = StoppingOnce()
        previous = signal.signal(signal.SIGUSR1, handler)
        # This thread waits there for the lock of the turn.
        sender = threading.Thread(target=send_in, args=(Turn.begin, handler))
        sender.start()
        with pytest.raises(Stop):
            gather(torch.tensor([0]))
        sender.join()
        signal.signal(signal.SIGUSR1, previous)
        tell("interrupted")
        thread.join()
    else:
        wait_until("interrupted")
        thread.start()
        thread.join()
        outcomes.append(outcome_of(lambda: gather(torch.tensor([1])).tolist()))
    outcomes.append(refused())
    return outcomes, gather(torch.tensor([10 + state.process_index])).tolist()


def test_a_call_may_be_interrupted_while_it_waits_for_its_turn(two: Processes) -> None:
    (first, values), (second, others) = two.run(interrupted_while_another_thread_calls)
    assert first[0] == second[0] == [0, 1]
    assert "was interrupted by Stop" in second[1]
    assert "was interrupted by Stop" in first[1]
    assert first[1] == second[2]
    assert values == others == [10, 11]


def differs_from_the_interrupted_call() -> tuple[str, list[int]]:
    """The other process calls something else than what was interrupted."""
    state = PartialState(cpu=True)
    if state.is_main_process:
        with signalled_in_a_call(stop), pytest.raises(Stop):
            gather(torch.tensor([0]))
        tell("interrupted")
    else:
        wait_until("interrupted")
        assert "was interrupted by Stop" in refused("wait_for_everyone")
    return refused("wait_for_everyone"), gather(torch.tensor([state.process_index])).tolist()


def test_another_call_than_the_interrupted_one_is_refused(two: Processes) -> None:
    (first, values), (second, others) = two.run(differs_from_the_interrupted_call)
    assert "was interrupted by Stop" in first
    assert first == second
    assert values == others == [0, 1]


DATA: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather([torch.ones(LARGE), torch.ones(3, dtype=torch.int64)]),
    "reduce": lambda: reduce(torch.ones(LARGE)),
    "broadcast": lambda: broadcast(torch.ones(LARGE)),
    "scatter": lambda: scatter(torch.ones(2 * LARGE) if PartialState().is_main_process else None),
    "all_to_all": lambda: all_to_all(torch.ones(2 * LARGE)),
    "gather_object": lambda: gather_object(["x" * 300_000]),
    "broadcast_object_list": lambda: broadcast_object_list(["x" * 300_000]),
}


def interrupted_before_data(operation: str, handler: Any = stop) -> list[Any]:
    """Rank 0 leaves a call whose headers the others find equal, so that they may wait for its data."""
    state = PartialState(cpu=True, timeout=300.0)
    wait_for_everyone()
    outcomes = []
    if state.is_main_process:
        with signalled_in_a_call(handler), pytest.raises((Stop, CollectiveError)):
            DATA[operation]()
        tell("interrupted")
    else:
        wait_until("interrupted")
        outcomes.append(outcome_of(lambda: str(DATA[operation]())))
    outcomes += [outcome_of(lambda value=value: gather(torch.tensor([value])).tolist()) for value in range(2)]
    tell("ends")
    if state.is_main_process:
        wait_until("ends", state.num_processes)
    return outcomes


@pytest.mark.parametrize("operation", DATA)
def test_nobody_waits_for_the_data_of_an_interrupted_call(two: Processes, operation: str) -> None:
    first, second = two.run(interrupted_before_data, operation)
    assert "interrupted by Stop" in first[0], first
    if first[0].startswith("ShapeMismatch"):
        assert second[1] == first[0]
        assert first[1] == second[2] == [1, 1]
    else:
        assert all(outcome.startswith("CollectiveError") for outcome in [*first, *second]), [*first, *second]
        assert all("interrupted by Stop" in outcome for outcome in (first[1], second[0])), second


def test_nobody_waits_for_the_data_of_a_call_that_a_collective_error_of_a_handler_ended(two: Processes) -> None:
    for outcomes in two.run(interrupted_before_data, "gather", stop_as_a_collective):
        assert all("interrupted by CollectiveError" in outcome for outcome in outcomes[:1]), outcomes


def enters_after_the_handler(operation: str) -> tuple[list[int], list[Any]]:
    state, errors = PartialState(cpu=True), []

    def handler(*_: Any) -> None:
        try:
            OPERATIONS[operation](99)
        except NotReady as error:
            errors.append(str(error))
        finally:
            tell("handled")

    if state.is_main_process:
        with signalled_in_a_call(handler):
            outer = gather(torch.tensor([0])).tolist()
    else:
        wait_until("handled")
        outer = gather(torch.tensor([1])).tolist()
    return outer, [gather(torch.tensor([10 + state.process_index])).tolist(), errors]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_inside_a_call_is_refused_and_the_outer_one_is_right(two: Processes, operation: str) -> None:
    (outer, (later, errors)), others = two.run(enters_after_the_handler, operation)
    assert outer == others[0] == [0, 1]
    assert later == others[1][0] == [10, 11]
    assert len(errors) == 1
    assert "inside gather() at" in errors[0]


def threads_in_another_order() -> dict[str, Any]:
    """Two threads gather; on each process another one is the first."""
    state, outcomes = PartialState(cpu=True), {}
    rank, first_calls = state.process_index, threading.Event()
    if rank == 0:
        # Other processes may have created more threads.
        threading.Thread(target=first_calls.wait).start()
    waiting = is_waiting()

    def work(name: str, is_first: bool) -> None:
        if not is_first:
            first_calls.wait()
        outcomes[name] = outcome_of(lambda: gather(torch.tensor([ord(name)])).tolist())

    threads = [threading.Thread(target=work, args=(name, (name == "b") == bool(rank))) for name in "ab"]
    for thread in threads:
        thread.start()
    while not waiting():
        time.sleep(0.01)
    first_calls.set()
    for thread in threads:
        thread.join()
    outcomes["later"] = gather(torch.tensor([rank])).tolist()
    return outcomes


def is_about_threads(outcome: Any) -> bool:
    return "in different threads" in str(outcome) or "several threads call collectives at the same time" in str(outcome)


def test_threads_that_meet_in_another_order_get_errors(two: Processes) -> None:
    for outcomes in two.run(threads_in_another_order):
        assert outcomes.pop("later") == [0, 1]
        for outcome in outcomes.values():
            assert is_about_threads(outcome)
            parts = ("ShapeMismatch: ", "'Thread (work)'", "'Thread (work) (2)'")
            assert all(part in outcome for part in parts), outcome


def racing_threads(rounds: int) -> list[Any]:
    """What threads get that gather at the same time, in any order."""
    PartialState(cpu=True)
    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(rounds):
            outcome = outcome_of(lambda: gather(torch.tensor([number])).tolist())
            if outcome != [number, number] and not is_about_threads(outcome):
                wrong.append((number, outcome))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    work(3)
    for thread in threads:
        thread.join()
    return wrong


def test_threads_never_get_the_values_of_others(two: Processes) -> None:
    assert two.run(racing_threads, 50) == [[], []]


def short_threads(rounds: int) -> list[Any]:
    """What pairs of threads get that make one call each."""
    PartialState(cpu=True)
    wrong: list[Any] = []

    def work(number: int) -> None:
        outcome = outcome_of(lambda: gather(torch.tensor([number])).tolist())
        if outcome != [number, number] and not is_about_threads(outcome):
            wrong.append((number, outcome))

    for number in range(rounds):
        threads = [threading.Thread(target=work, args=(2 * number + index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return wrong


def test_short_threads_never_get_the_values_of_others(two: Processes) -> None:
    assert two.run(short_threads, 50) == [[], []]


def one_thread_after_another() -> list[Any]:
    """Threads that take turns; on rank 1 another thread was started before them."""
    state, results = PartialState(cpu=True), [gather(torch.tensor([0])).tolist()]
    ends = threading.Event()
    if not state.is_main_process:
        threading.Thread(target=ends.wait).start()

    def work(number: int) -> None:
        results.append(gather(torch.tensor([number])).tolist())

    for number in range(1, 4):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
    results.append(gather(torch.tensor([4])).tolist())
    ends.set()
    return results


def test_threads_may_take_turns(two: Processes) -> None:
    assert two.run(one_thread_after_another) == [[[number] * 2 for number in range(5)]] * 2


@contextmanager
def executor(prefix: str) -> Iterator[Callable[..., Callable[[], Any]]]:
    """Start a task in a pool of two workers; call the result to wait for it."""
    with ThreadPoolExecutor(2, prefix) as pool:
        yield lambda *task: pool.submit(*task).result


@contextmanager
def thread_pool() -> Iterator[Callable[..., Callable[[], Any]]]:
    with ThreadPool(2) as pool:
        yield lambda function, *arguments: pool.apply_async(function, arguments).get


POOLS: dict[str, Callable[[], Any]] = {
    "executor": functools.partial(executor, ""),
    "named executor": functools.partial(executor, "loads"),
    "ThreadPool": thread_pool,
}


def calls_of_other_workers(kind: str) -> list[Any]:
    """Calls one after another in a pool; on rank 1 one of its workers does something else."""
    state, begun, ends = PartialState(cpu=True), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        ends.wait()

    def call(value: int) -> list[int]:
        return gather(torch.tensor([value])).tolist()  # type: ignore[no-any-return]

    with POOLS[kind]() as pool:
        if not state.is_main_process:
            pool(wait)
            begun.wait()
        results = [pool(call, value)() for value in range(3)]
        ends.set()
    return [*results, call(3)]


@pytest.mark.parametrize("kind", POOLS)
def test_any_worker_of_a_pool_may_call(two: Processes, kind: str) -> None:
    assert two.run(calls_of_other_workers, kind) == [[[number] * 2 for number in range(4)]] * 2


def overlapping_tasks() -> tuple[dict[str, Any], list[int]]:
    """Tasks of a pool call at the same time on rank 0, and one after another on rank 1."""
    state, outcomes = PartialState(cpu=True), {}
    wait_for_everyone()

    def task(name: str) -> None:
        outcomes[name] = outcome_of(lambda: gather(torch.tensor([ord(name)])).tolist())

    def is_waiting_for_its_turn() -> bool:
        return any(frame.f_code is Turn.begin.__code__ for frame in sys._current_frames().values())

    with ThreadPoolExecutor(2) as pool:
        if state.is_main_process:
            waiting = is_waiting()
            first = pool.submit(task, "a")
            while not waiting():
                time.sleep(0.01)
            second = pool.submit(task, "b")
            while not is_waiting_for_its_turn():
                time.sleep(0.01)
            tell("both call")
            first.result()
            second.result()
        else:
            wait_until("both call")
            for name in "ab":
                pool.submit(task, name).result()
        pool.submit(task, "c").result()
    return outcomes, gather(torch.tensor([state.process_index])).tolist()


def test_overlapping_calls_of_a_pool_and_those_after_them_are_refused(two: Processes) -> None:
    (first, values), (second, others) = two.run(overlapping_tasks)
    assert first == second
    assert first["a"] == [ord("a")] * 2
    for name in "bc":
        assert "several threads call collectives at the same time" in first[name]
        assert "'ThreadPoolExecutor' on ranks 0-1. On rank 0 " in first[name]
        assert "`group`" in first[name]
    assert values == others == [0, 1]


def pools_in_another_order() -> list[str]:
    """Two pools without names, each with a worker that runs; other ranks may have had more pools."""
    state = PartialState(cpu=True)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        if state.is_main_process:
            with ThreadPoolExecutor(1) as other:
                other.submit(int).result()
        for pool in (first, second):
            pool.submit(int).result()
        order = (first, second) if state.is_main_process else (second, first)
        return [pool.submit(outcome_of, lambda: gather(torch.ones(1)).tolist()).result() for pool in order]


def test_pools_without_a_name_are_told_apart(two: Processes) -> None:
    for outcomes in two.run(pools_in_another_order):
        for outcome in outcomes:
            assert "in different threads" in outcome
            assert "'ThreadPoolExecutor (2)'" in outcome


def groups_of_threads() -> list[Any]:
    """Each thread has a group of its own; they start in another order on each process."""
    PartialState(cpu=True)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    results: list[Any] = [None] * 3

    def work(number: int) -> None:
        results[number] = [gather(torch.tensor([number]), group=groups[number]).tolist() for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    order = threads if current.process().rank else threads[::-1]
    for thread in order:
        thread.start()
    waited = [gather(torch.tensor([9])).tolist() for _ in range(20)]
    for thread in order:
        thread.join()
    return [*results, waited]


def test_threads_with_a_group_each_need_no_order(two: Processes) -> None:
    assert two.run(groups_of_threads) == [[[[number] * 2] * 20 for number in (0, 1, 2, 9)]] * 2
