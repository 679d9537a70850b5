"""Who a process is, and the order in which processes do things."""

from __future__ import annotations

import socket
from collections import namedtuple
from datetime import timedelta
from typing import Any

import pytest
import torch

from accel_state import AcceleratorState, DistributedType, InitProcessGroupKwargs, PartialState, current
from accel_state.errors import CollectiveError, Conflict, NotReady, SettingError, ShapeMismatch, UnknownKind
from accel_state.process import split_inputs
from accel_testing.fresh import fresh
from accel_testing.processes import Processes, ProcessesFailed

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_assigning_debug_changes_all_states() -> None:
    state = PartialState(cpu=True)
    state.debug = True
    assert PartialState().debug is True
    AcceleratorState().debug = False
    assert state.debug is False


def test_state_of_a_single_process() -> None:
    state = PartialState(cpu=True)

    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.device == torch.device("cpu")
    assert state.distributed_type is DistributedType.NO
    assert state.backend is None
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed


def test_all_instances_show_the_same_process() -> None:
    first = PartialState(cpu=True)
    second = PartialState()

    assert second.device == first.device
    PartialState._reset_state()
    assert not first.initialized


def test_process_raises_before_the_first_state() -> None:
    with pytest.raises(NotReady, match="Create a PartialState"):
        current.process()


def describe() -> dict[str, Any]:
    state = PartialState(cpu=True)
    return {
        "rank": state.process_index,
        "count": state.num_processes,
        "type": state.distributed_type.value,
        "backend": state.backend,
        "last": state.is_last_process,
    }


def test_state_of_two_processes(two: Processes) -> None:
    assert two.run(describe) == [
        {"rank": 0, "count": 2, "type": "MULTI_CPU", "backend": "gloo", "last": False},
        {"rank": 1, "count": 2, "type": "MULTI_CPU", "backend": "gloo", "last": True},
    ]


def collectives() -> list[Any]:
    transport = current.process_or_start().transport
    rank = transport.rank
    gathered = torch.zeros(4)
    transport.all_gather(gathered, torch.tensor([float(rank), 10.0])).wait()
    total, least = torch.tensor([rank + 1.0]), torch.tensor([rank + 1.0])
    transport.all_reduce(total).wait()
    transport.all_reduce(least, "min").wait()
    told = torch.tensor([float(rank)])
    transport.broadcast(told, src=1).wait()
    mine = torch.zeros(1)
    transport.scatter(mine, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0).wait()
    brought = [torch.zeros(1), torch.zeros(1)] if rank == 1 else None
    transport.gather(brought, torch.tensor([rank + 7.0]), dst=1).wait()
    return [
        gathered.tolist(),
        total.item(),
        least.item(),
        told.item(),
        mine.item(),
        torch.cat(brought or [mine]).tolist(),
    ]


def test_collectives_of_the_transport_of_two_processes(two: Processes) -> None:
    first, second = two.run(collectives)

    assert first == [[0.0, 10.0, 1.0, 10.0], 3.0, 1.0, 1.0, 5.0, [5.0]]
    assert second == [[0.0, 10.0, 1.0, 10.0], 3.0, 1.0, 1.0, 6.0, [7.0, 8.0]]


def collectives_alone() -> None:
    PartialState(cpu=True)
    transport = current.process().transport
    gathered, mine = torch.zeros(2), torch.zeros(1)
    transport.all_gather(gathered, torch.tensor([1.0, 2.0])).wait()
    transport.scatter(mine, [torch.tensor([3.0])], src=0).wait()
    transport.barrier()

    assert gathered.tolist() == [1.0, 2.0]
    assert mine.item() == 3.0
    assert transport.store() is None


def test_the_collectives_of_one_process() -> None:
    collectives_alone()


def order(path: str) -> None:
    state = PartialState(cpu=True)
    with state.main_process_first(), open(path, "a") as file:
        file.write(f"{state.process_index}")


def test_main_process_first_runs_rank_0_before_the_others(two: Processes, tmp_path: Any) -> None:
    for attempt in range(3):
        two.run(order, str(tmp_path / str(attempt)))
        assert (tmp_path / str(attempt)).read_text() == "01"


def decorated() -> list[Any]:
    state = PartialState(cpu=True)

    @state.on_main_process
    def main() -> str:
        return "main"

    @state.on_last_process
    def last() -> str:
        return "last"

    @state.on_process(process_index=1)
    def first() -> str:
        return "one"

    @state.on_local_process(local_process_index=0)
    def local() -> str:
        return "local"

    return [main(), last(), first(), local()]


def test_decorators_run_a_function_on_the_selected_process_only(two: Processes) -> None:
    assert two.run(decorated) == [["main", None, None, "local"], [None, "last", "one", None]]


def test_a_single_process_runs_functions_of_every_decorator() -> None:
    with fresh():
        state = PartialState(cpu=True)
        for chosen in (state.on_process(process_index=3), state.on_local_process(local_process_index=3)):
            assert chosen(lambda: "ran")() == "ran"
        assert state.on_main_process(lambda: "ran")() == "ran"


def fail_on_one() -> None:
    if PartialState(cpu=True).process_index == 1:
        raise ValueError("told on purpose")


def test_a_failing_rank_is_shown_with_its_traceback(two: Processes) -> None:
    with pytest.raises(ProcessesFailed, match="told on purpose"):
        two.run(fail_on_one)
    assert [outcome["rank"] for outcome in two.run(describe)] == [0, 1]


def hang_on_one() -> None:
    state = PartialState(cpu=True)
    if state.process_index == 1:
        state.wait_for_everyone()
    else:
        import signal

        signal.pause()


def test_a_hanging_rank_is_ended(two: Processes) -> None:
    two.run(describe)
    outcomes = two.outcomes(hang_on_one, timeout=2)
    assert [outcome.hung for outcome in outcomes] == [True, True]


def die_on_one() -> None:
    import os

    if PartialState(cpu=True).process_index == 1:
        os._exit(7)


def test_a_dead_rank_is_reported_with_its_exit_code(two: Processes) -> None:
    outcomes = two.outcomes(die_on_one)
    assert outcomes[1].exitcode == 7
    assert two.run(describe)[1]["rank"] == 1


def meet_nobody() -> str:
    with pytest.raises(CollectiveError) as caught:
        PartialState(cpu=True, timeout=1)
    return str(caught.value)


def test_a_rendezvous_address_without_a_host_raises(two: Processes) -> None:
    # Nobody else is given a port that is held, and nobody answers on it before it is listened on.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        place = {"MASTER_PORT": str(held.getsockname()[1]), "RANK": "1"}
        told = two.run(meet_nobody, environment=place)
    for message in told:
        assert place["MASTER_PORT"] in message
        assert "rendezvous failed" in message


def test_a_launched_process_without_a_rendezvous_address_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="MASTER_ADDR and MASTER_PORT"):
        PartialState(cpu=True)


@pytest.mark.parametrize("timeout", [5, 5.0, timedelta(seconds=5)])
def test_process_group_timeout_accepts_seconds_and_timedelta(timeout: Any) -> None:
    assert InitProcessGroupKwargs(timeout=timeout).timeout == timedelta(seconds=5)


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_invalid_process_group_timeouts_are_refused(timeout: Any) -> None:
    with pytest.raises(SettingError, match="positive duration"):
        InitProcessGroupKwargs(timeout=timeout)


def test_a_url_as_backend_becomes_the_init_method() -> None:
    options = InitProcessGroupKwargs("tcp://127.0.0.1:1")
    assert (options.backend, options.init_method) == (None, "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ([1, 2, 3], [[1, 2], [3]]),
        ((1, 2, 3), [(1, 2), (3,)]),
        ([1], [[1], []]),
        ([], [[], []]),
        ({"a": [1, 2, 3]}, [{"a": [1, 2]}, {"a": [3]}]),
    ],
)
def test_split_inputs(inputs: Any, parts: list[Any]) -> None:
    assert [split_inputs(inputs, 2, index) for index in range(2)] == parts


def test_splitting_a_named_tuple_gives_plain_tuples() -> None:
    pair = namedtuple("pair", ["first", "second", "third"])
    assert [split_inputs(pair(1, 2, 3), 2, index) for index in range(2)] == [(1, 2), (3,)]
    assert split_inputs(pair(1, 2, 3), 2, 1, apply_padding=True) == (3, 3)


def test_splitting_with_padding() -> None:
    assert [split_inputs([1, 2, 3], 2, index, apply_padding=True) for index in range(2)] == [[1, 2], [3, 3]]
    parts = [split_inputs(torch.arange(5), 4, index, apply_padding=True).tolist() for index in range(4)]
    assert parts == [[0, 1], [2, 4], [3, 4], [4, 4]]
    assert [split_inputs((1, 2, 3, 4, 5), 4, index, apply_padding=True) for index in range(2)] == [(1, 2), (3, 5)]
    assert [split_inputs([1], 3, index, apply_padding=True) for index in range(3)] == [[1], [1], [1]]


def test_split_inputs_refuses_other_types() -> None:
    with pytest.raises(UnknownKind, match="of type int"):
        split_inputs(3, 2, 0)
    with pytest.raises(ShapeMismatch, match="a: 1, b: 2"):
        split_inputs({"a": [1], "b": [1, 2]}, 2, 0)


def test_accelerator_state_refuses_a_second_mixed_precision() -> None:
    assert AcceleratorState("bf16", cpu=True).mixed_precision == "bf16"
    assert AcceleratorState().mixed_precision == "bf16"
    with pytest.raises(Conflict, match="mixed_precision='bf16'"):
        AcceleratorState("fp16")


def test_an_unknown_precision_names_the_closest() -> None:
    with pytest.raises(SettingError, match="Did you mean 'bf16'"):
        AcceleratorState("bf61", cpu=True)


def test_mixed_precision_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert AcceleratorState(cpu=True).mixed_precision == "fp16"
