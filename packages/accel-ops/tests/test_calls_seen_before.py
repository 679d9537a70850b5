"""What a collective does in Python when its line of code gives the same structure, shapes and dtypes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_ops import broadcast, gather, reduce
from accel_state import PartialState
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.profiling import profile
from accel_testing.recording_transport import recording

CALLS: dict[str, Callable[[Any], Any]] = {"gather": gather, "reduce": reduce, "broadcast": broadcast}

MADE_ONCE = frozenset(
    {"fingerprint_of", "plan_for", "check_leaf", "leaves_with_paths", "of", "own_payload", "payloads"}
)
"""Functions that make a plan: they run for the first call of a structure only."""


def batch(leaves: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"leaf{index}": torch.ones(8, 16, dtype=dtype) for index in range(leaves)}


def python_calls(function: Callable[[Any], Any], data: Any, times: int) -> list[Counter[str]]:
    """The Python functions that each of several calls of one line runs, with their numbers."""
    found: list[Counter[str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[-1][frame.f_code.co_name] += 1

    for _ in range(times):
        found.append(Counter())
        with profile(note):
            function(data)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_takes_the_plan_and_its_views_from_the_cache(name: str) -> None:
    with fresh():
        torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        PartialState(cpu=True)
        first, second, third = python_calls(CALLS[name], batch(64), 3)
    assert first["fingerprint_of"] == 1
    assert {"plan_for", "own_payload", "payloads"} <= first.keys()
    assert MADE_ONCE.isdisjoint(second)
    assert second == third


@pytest.mark.parametrize("name", CALLS)
def test_python_calls_do_not_grow_with_the_number_of_leaves(name: str) -> None:
    with fresh():
        torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        PartialState(cpu=True)
        few = python_calls(CALLS[name], batch(2), 2)[-1]
        many = python_calls(CALLS[name], batch(80), 2)[-1]
    assert few == many


def changing_lines() -> list[Any]:
    """One line of code with data that change: values, shapes, dtypes, structures and arguments."""
    rank = PartialState(cpu=True).process_index
    given = (
        [torch.full((2,), rank)],
        [torch.full((2,), rank + 5)],
        [torch.full((3,), rank)],
        [torch.full((2,), float(rank))],
        (torch.full((2,), rank),),
        {"a": torch.full((2,), rank)},
        [torch.full((2,), rank)],
    )
    gathered = [gather(data) for data in given]
    return gathered + [reduce(torch.full((2,), rank + 1), op) for op in ("sum", "max", "sum")]


def test_a_line_whose_data_change_gets_what_it_gave(two: Processes) -> None:
    expected = [
        [torch.tensor([0, 0, 1, 1])],
        [torch.tensor([5, 5, 6, 6])],
        [torch.tensor([0, 0, 0, 1, 1, 1])],
        [torch.tensor([0.0, 0.0, 1.0, 1.0])],
        (torch.tensor([0, 0, 1, 1]),),
        {"a": torch.tensor([0, 0, 1, 1])},
        [torch.tensor([0, 0, 1, 1])],
        torch.tensor([3, 3]),
        torch.tensor([2, 2]),
        torch.tensor([3, 3]),
    ]
    for found in two.run(changing_lines):
        assert [type(one) for one in found] == [type(one) for one in expected]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def kept_results() -> list[list[float]]:
    """Results of one line, read after later calls have used the same buffers."""
    rank = PartialState(cpu=True).process_index
    kept = []
    for value in range(3):
        data = [torch.full((2,), float(10 * value + rank)), torch.full((2,), rank, dtype=torch.int64)]
        kept.append((gather(data)[0], reduce(data, "sum")[0], broadcast(data)[0]))
    return [tensor.tolist() for results in kept for tensor in results]


def test_results_do_not_share_the_buffers_that_later_calls_use(two: Processes) -> None:
    by_value = [
        ([10.0 * v, 10.0 * v, 10.0 * v + 1, 10.0 * v + 1], [20.0 * v + 1] * 2, [10.0 * v] * 2) for v in range(3)
    ]
    assert two.run(kept_results) == [[one for results in by_value for one in results]] * 2


def first_in_inference_mode() -> list[Any]:
    """The views that a plan keeps are of use in every mode, whichever mode the first call was made in."""
    rank = PartialState(cpu=True).process_index
    found = []
    for mode in (True, False, True):
        with torch.inference_mode(mode), recording() as records:
            data = [torch.full((2,), float(rank))]
            found.append((gather(data)[0].tolist(), reduce(data)[0].tolist(), broadcast(data)[0].tolist()))
        assert len(records) == 3
    return found


def test_a_plan_of_a_call_in_inference_mode_serves_calls_outside_of_it(two: Processes) -> None:
    assert two.run(first_in_inference_mode) == [[([0.0, 0.0, 1.0, 1.0], [0.5, 0.5], [0.0, 0.0])] * 3] * 2
