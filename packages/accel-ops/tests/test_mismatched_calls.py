"""Processes that do not call the same: the same named error on every one, and the next call works."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel_ops import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
)
from accel_state import PartialState
from accel_state.errors import AccelError, SettingError, ShapeMismatch, UnknownKind
from accel_state.logging import get_logger
from accel_state.process import wait_for_everyone
from accel_testing.fresh import fresh
from accel_testing.processes import Processes


@pytest.fixture(scope="module", params=[2, 4])
def group(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param, timeout=250) as group:
        yield group


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2, timeout=250) as group:
        yield group


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


CALLS: dict[str, tuple[Any, Any]] = {
    "shape": (lambda: gather({"a": tensor(2, 3)}), lambda: gather({"a": tensor(3, 3)})),
    "shape of a large tensor": (lambda: gather([tensor(600, 600)]), lambda: gather([tensor(300, 600)])),
    "shape across the limit of packing": (lambda: gather(tensor(600, 600)), lambda: gather(tensor(6))),
    "dtype": (lambda: gather(tensor(2)), lambda: gather(tensor(2, dtype=torch.float64))),
    "dtype of the same size": (lambda: gather(tensor(2)), lambda: gather(tensor(2, dtype=torch.int32))),
    "structure": (lambda: gather({"a": tensor(2)}), lambda: gather({"a": tensor(2), "b": tensor(1)})),
    "depth": (lambda: gather([tensor(2)]), lambda: gather([[tensor(2)]])),
    "operation": (lambda: gather([tensor(2)]), lambda: reduce([tensor(2)])),
    "operation on objects": (lambda: gather_object(["a"]), lambda: broadcast_object_list(["a"])),
    "tensors and objects": (lambda: gather_object(["a"]), lambda: gather(tensor(2))),
    "objects too long for the header": (lambda: gather_object(["a" * 200_000]), lambda: gather(tensor(2))),
    "src": (lambda: broadcast(tensor(2), src=0), lambda: broadcast(tensor(2), src=1)),
    "op": (lambda: reduce(tensor(2), "sum"), lambda: reduce(tensor(2), "mean")),
    "length": (lambda: broadcast_object_list([1]), lambda: broadcast_object_list([1, 2])),
    "dim": (lambda: pad_across_processes(tensor(2, 2), dim=0), lambda: pad_across_processes(tensor(2, 2), dim=1)),
    "dimensions": (lambda: pad_across_processes(tensor(2)), lambda: pad_across_processes(tensor(2, 2))),
    "scatter": (lambda: scatter(tensor(4)), lambda: gather(tensor(4))),
    "barrier": (lambda: wait_for_everyone(), lambda: gather(tensor(2))),
    "barrier around a block": (lambda: one_after_another(), lambda: reduce(tensor(2))),
    "lines in the order of the ranks": (lambda: log_in_order(), lambda: wait_for_everyone()),
}

WORDS = {
    "shape": ["['a']: (2, 3) torch.float32 on rank", "(3, 3) torch.float32 on rank", "gather_object"],
    "dtype": ["torch.float32 on rank", "torch.float64 on rank", "Convert"],
    "structure": ["['b']: absent on rank", "(1,) torch.float32 on rank", "same structure"],
    "operation": ["gather() at ", "reduce() at ", "on rank", "test_mismatched_calls.py:"],
    "src": ["src is 0 on rank", "1 on rank"],
    "op": ["op is sum on rank", "mean on rank"],
    "length": ["length is 1 on rank", "2 on rank"],
    "dim": ["dim is 0 on rank"],
    "barrier": ["wait_for_everyone() at ", "gather() at ", "test_mismatched_calls.py:"],
    "barrier around a block": ["wait_for_everyone() at ", "reduce() at ", "test_mismatched_calls.py:"],
    "lines in the order of the ranks": ["log() at ", "wait_for_everyone() at ", "test_mismatched_calls.py:"],
}


def one_after_another() -> None:
    with PartialState().main_process_first():
        pass


def log_in_order() -> None:
    get_logger(__name__, "INFO").info("here", main_process_only=False, in_order=True)


def differ(name: str, known: bool) -> str:
    """The last process calls differently; afterwards all call the same."""
    state = PartialState(cpu=True)
    usual, other = CALLS[name]
    if known:
        for call in (usual, other):
            call()
    with pytest.raises(ShapeMismatch) as caught:
        (other if state.is_last_process else usual)()
    assert gather(torch.tensor(state.process_index)).tolist() == list(range(state.num_processes))
    assert isinstance(caught.value, ValueError)
    assert all((caught.value.failure, caught.value.obstacle, caught.value.remedy))
    return str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_every_rank_raises_the_same_error_and_later_calls_work(group: Processes, name: str) -> None:
    for messages in (group.run(differ, name, True), group.run(differ, name, False)):
        assert len(set(messages)) == 1, messages
        for words in WORDS.get(name, []):
            assert words in messages[0], messages[0]


def known_against_unknown() -> str:
    state = PartialState(cpu=True)
    for _ in range(3):
        gather({"a": tensor(2)})
    with pytest.raises(ShapeMismatch) as caught:
        gather({"a": tensor(2)} if state.process_index else {"z": [tensor(5), tensor(1)]})
    assert gather({"a": tensor(2)})["a"].numel() == 2 * state.num_processes
    return str(caught.value)


def test_a_cached_plan_against_a_new_structure_is_a_mismatch(group: Processes) -> None:
    messages = group.run(known_against_unknown)
    assert len(set(messages)) == 1
    assert "['z'][0]: (5,) torch.float32 on rank" in messages[0]


def sparse_where_dense_is_known() -> str:
    state = PartialState(cpu=True)
    gather([tensor(2, 2)])
    with pytest.raises(AccelError) as caught:
        gather([tensor(2, 2) if state.process_index else tensor(2, 2).to_sparse()])
    assert gather([tensor(2, 2)])[0].shape == (2 * state.num_processes, 2)
    return type(caught.value).__name__


def test_a_sparse_tensor_where_a_dense_one_is_known(group: Processes) -> None:
    first, *others = group.run(sparse_where_dense_is_known)
    assert first == "UnknownKind"
    assert set(others) == {"ShapeMismatch"}


def many_leaves_differ() -> str:
    state = PartialState(cpu=True)
    with pytest.raises(ShapeMismatch) as caught:
        gather([tensor(1 + state.process_index) for _ in range(5000)])
    return str(caught.value)


def test_the_error_names_some_differing_leaves_and_counts_the_rest(group: Processes) -> None:
    (message,) = set(group.run(many_leaves_differ))
    assert "and 4995 more leaves" in message
    assert len(message) < 2000


BAD: dict[str, tuple[Any, type[AccelError], str]] = {
    "an int": (lambda: gather({"a": [tensor(1), 3]}), UnknownKind, "['a'][1]"),
    "None": (lambda: gather(None), UnknownKind, "NoneType"),
    "text to reduce": (lambda: reduce(["text"]), UnknownKind, "[0]"),
    "a sparse tensor": (lambda: gather([tensor(2, 2).to_sparse()]), UnknownKind, "sparse"),
    "a meta tensor": (lambda: gather([torch.ones(2, device="meta")]), UnknownKind, "meta"),
    "fp8 to add up": (lambda: reduce([tensor(2).to(torch.float8_e5m2)]), UnknownKind, "float8_e5m2"),
    "a mean of whole numbers": (lambda: reduce({"n": torch.tensor([1, 2])}), UnknownKind, "['n']"),
    "a fraction of whole numbers": (lambda: reduce(torch.tensor([1, 2]), "sum", 0.5), UnknownKind, "int64"),
    "text to join": (lambda: gather_object("text"), UnknownKind, "str"),
    "a dict to join": (lambda: gather_object({"a": 1}), UnknownKind, "[object]"),
    "a number to join": (lambda: gather_object(3), UnknownKind, "int"),
    "what cannot be pickled": (lambda: gather_object([1, threading.Lock()]), UnknownKind, "item 1, of type lock"),
    "a tuple to overwrite": (lambda: broadcast_object_list((1, 2)), UnknownKind, "tuple"),
    "no such source": (lambda: broadcast(tensor(2), src=9), SettingError, "src=9"),
    "no such source of objects": (lambda: broadcast_object_list([2], src=-1), SettingError, "src=-1"),
    "no such destination": (lambda: gather(tensor(2), dst=9), SettingError, "dst=9"),
    "a value a dtype cannot hold": (
        lambda: pad_across_processes(torch.tensor([1]), pad_index=2.5),
        SettingError,
        "2.5",
    ),
    "a value too large": (
        lambda: pad_across_processes(torch.tensor([1], dtype=torch.uint8), pad_index=-100),
        SettingError,
        "uint8",
    ),
    "a split that is uneven": (lambda: scatter({"a": tensor(7)}), SettingError, "['a']"),
    "a split of nothing": (lambda: scatter(torch.tensor(1.0)), SettingError, "no dimension"),
}


def all_bad(name: str) -> str:
    state = PartialState(cpu=True)
    call, error, words = BAD[name]
    with pytest.raises(AccelError) as caught:
        call()
    assert gather(torch.tensor(state.process_index)).tolist() == list(range(state.num_processes))
    if isinstance(caught.value, error):
        assert words in str(caught.value), str(caught.value)
    return type(caught.value).__name__


def one_bad(name: str) -> tuple[str, str]:
    """Process 0 gives what cannot be used, the others something that can."""
    state = PartialState(cpu=True)
    call, _, _ = BAD[name]
    with pytest.raises(AccelError) as caught:
        call() if state.is_main_process else gather(tensor(3))
    assert gather(torch.tensor(state.process_index)).tolist() == list(range(state.num_processes))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_named_error_on_the_rank_that_gave_it_and_on_the_others(two: Processes, name: str) -> None:
    _, error, words = BAD[name]
    assert two.run(all_bad, name)[0] == error.__name__
    (mine, text), (theirs, told) = two.run(one_bad, name)
    assert mine == error.__name__
    assert words in text
    assert theirs == "ShapeMismatch"
    assert "rank 0" in told
    assert words in told


def unknown_op() -> None:
    PartialState(cpu=True)
    with pytest.raises(SettingError, match="median"):
        reduce(tensor(2), "median")


def test_an_unknown_reduction_is_refused(two: Processes) -> None:
    two.run(unknown_op)


class FailsToPickle:
    def __reduce__(self) -> Any:
        raise MemoryError("not enough")


def fails_on_one() -> tuple[str, str]:
    state = PartialState(cpu=True)
    with pytest.raises((AccelError, MemoryError)) as caught:
        gather_object([FailsToPickle() if state.is_main_process else 1])
    assert gather_object([state.process_index]) == [0, 1]
    return type(caught.value).__name__, str(caught.value)


def test_a_failure_before_the_header_is_raised_on_the_other_ranks(two: Processes) -> None:
    (_, mine), (theirs, told) = two.run(fails_on_one)
    assert "not enough" in mine
    assert theirs == "ShapeMismatch"
    assert "not enough" in told


def nested_tensors() -> None:
    state = PartialState(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ragged = torch.nested.nested_tensor([tensor(2), tensor(3)])
        with pytest.raises(UnknownKind, match="nested"):
            gather([ragged])
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            padded = pad_across_processes([ragged, tensor(1 + state.process_index)])
    assert [warning.category.__name__ for warning in given] == ["CannotPadNestedTensorWarning"]
    assert padded[0] is ragged
    assert padded[1].shape == (state.num_processes,)


def test_nested_tensors_are_refused_or_returned_unchanged(two: Processes) -> None:
    two.run(nested_tensors)
    with fresh():
        nested_tensors()
