"""A call that several processes refuse is refused on one process too, with the same type of error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from accel_ops import broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce, scatter
from accel_state import PartialState
from accel_testing.fresh import fresh
from accel_testing.processes import Processes

CALLS: dict[str, Callable[[], Any]] = {
    "gather of a number": lambda: gather(3),
    "gather of a text in a dict": lambda: gather({"a": torch.ones(1), "b": "text"}),
    "gather of a sparse tensor": lambda: gather(torch.eye(2).to_sparse()),
    "gather to a rank that no process has": lambda: gather(torch.ones(1), dst=7),
    "mean of integers": lambda: reduce(torch.arange(3), "mean"),
    "scaled sum of integers": lambda: reduce(torch.arange(3), "sum", scale=0.5),
    "reduce of a number": lambda: reduce(2.5, "mean"),
    "broadcast of a number": lambda: broadcast(3),
    "broadcast from a rank that no process has": lambda: broadcast(torch.ones(1), src=7),
    "broadcast of objects that are no list": lambda: broadcast_object_list("text"),
    "broadcast of objects from a rank that no process has": lambda: broadcast_object_list([1], src=7),
    "gather of a text as objects": lambda: gather_object("text"),
    "gather of a dict as objects": lambda: gather_object({"a": 1}),
    "gather of a number as objects": lambda: gather_object(3),
    "gather of an object that cannot be pickled": lambda: gather_object([lambda: 1]),
    "broadcast of an object that cannot be pickled": lambda: broadcast_object_list([lambda: 1]),
    "padding of a number": lambda: pad_across_processes(3),
    "padding of a sparse tensor": lambda: pad_across_processes(torch.eye(2).to_sparse()),
    "padding with what a dtype cannot hold": lambda: pad_across_processes(torch.arange(3), pad_index=0.5),
    "scatter of a number": lambda: scatter(3),
    "scatter of a scalar tensor": lambda: scatter(torch.tensor(3.0)),
    "scatter from a rank that no process has": lambda: scatter(torch.ones(2), src=7),
}


def outcome(name: str) -> str:
    """The type of the error that a call raises."""
    PartialState(cpu=True)
    try:
        return f"returned {CALLS[name]()!r}"
    except Exception as error:
        return type(error).__name__


def outcomes() -> dict[str, str]:
    return {name: outcome(name) for name in CALLS}


@pytest.fixture(scope="module")
def on_two() -> Iterator[dict[str, str]]:
    with Processes(2) as two:
        yield two.run(outcomes)[0]


@pytest.mark.parametrize("name", CALLS)
def test_one_process_raises_the_error_of_two(name: str, on_two: dict[str, str]) -> None:
    assert "returned" not in on_two[name]
    with fresh():
        assert outcome(name) == on_two[name]


def test_one_process_gathers_the_items_of_an_iterator() -> None:
    with fresh():
        PartialState(cpu=True)
        assert gather_object(number for number in range(2)) == [0, 1]
