"""all_to_all, reduce_scatter, products, and gathers through which gradients flow, on one, two and many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from accel_ops import SettingError, ShapeMismatch, UnknownKind, all_to_all, gather, reduce, reduce_scatter
from accel_state import PartialState
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.threads import run_as_threads

COUNTS = [2, 5, 16]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


def exchanged() -> dict[str, Any]:
    """What a rank gets of tensors whose elements say who sent them to whom."""
    state = PartialState(cpu=True)
    rank, size = state.process_index, state.num_processes
    mine = {
        "a": torch.tensor([100 * rank + other for other in range(size)]),
        "b": [torch.full((2 * size, 3), float(rank)), torch.zeros(0, 4)],
        "c": torch.ones(size, dtype=torch.bool),
    }
    found: dict[str, Any] = all_to_all(mine)
    return {"a": found["a"].tolist(), "b": found["b"][0][:, 0].tolist(), "empty": tuple(found["b"][1].shape)}


def exchange_expected(rank: int, size: int) -> dict[str, Any]:
    return {
        "a": [100 * other + rank for other in range(size)],
        "b": [float(other) for other in range(size) for _ in range(2)],
        "empty": (0, 4),
    }


@pytest.mark.parametrize("size", COUNTS)
def test_all_to_all_between_threads(size: int) -> None:
    assert run_as_threads(size, exchanged) == [exchange_expected(rank, size) for rank in range(size)]


def test_all_to_all_between_processes(two: Processes) -> None:
    assert two.run(exchanged) == [exchange_expected(rank, 2) for rank in range(2)]


OPS = ["sum", "mean", "product", "max", "min"]


def reduced() -> dict[str, list[Any]]:
    """Parts of `reduce_scatter`, and the same parts of what `reduce` returns."""
    state = PartialState(cpu=True)
    rank, size = state.process_index, state.num_processes
    data = {"x": torch.arange(3.0 * size).view(size, 3) + rank, "y": [torch.full((2 * size,), rank + 1.0)]}
    data["large"] = torch.full((size, 100_000), rank + 1.0)
    found = {}
    for op in OPS:
        part, whole = reduce_scatter(data, op), reduce(data, op)
        same = [
            torch.equal(part["x"], whole["x"][rank : rank + 1]),
            torch.equal(part["y"][0], whole["y"][0][2 * rank : 2 * rank + 2]),
            torch.equal(part["large"], whole["large"][rank : rank + 1]),
        ]
        found[op] = [all(same), part["y"][0].tolist()]
    return found


@pytest.mark.parametrize("size", [2, 5])
def test_reduce_scatter_gives_the_parts_of_reduce(size: int) -> None:
    values = [float(rank + 1) for rank in range(size)]
    product = float(torch.tensor(values).prod())
    expected = dict(zip(OPS, [sum(values), sum(values) / size, product, max(values), min(values)], strict=True))
    for found in run_as_threads(size, reduced):
        assert found == {op: [True, [value] * 2] for op, value in expected.items()}


def test_reduce_scatter_between_processes(two: Processes) -> None:
    for found in two.run(reduced):
        assert found["product"] == [True, [2.0, 2.0]]
        assert found["mean"] == [True, [1.5, 1.5]]


def products() -> list[Any]:
    rank = PartialState(cpu=True).process_index
    dtypes = (torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32)
    small = [reduce(torch.tensor([rank + 2, 3]).to(dtype), "product").tolist() for dtype in dtypes]
    flags = reduce(torch.tensor([True, rank == 0, False]), "product").tolist()
    large = reduce(torch.full((200_000,), rank + 2.0), "product")
    nan = reduce(torch.tensor([float("nan") if rank else 1.0]), "product").isnan().item()
    return [small, flags, large.unique().tolist(), nan, reduce(torch.tensor([rank + 2.0]), "product", scale=0.5).item()]


def test_products_of_all_dtypes(two: Processes) -> None:
    assert two.run(products) == [[[[6, 9]] * 5, [True, False, False], [6.0], True, 3.0]] * 2


def gradients() -> tuple[list[float], list[float], float]:
    """Each rank weighs the gathered rows by rank + 1, so that the gradient of each row is the sum of all weights."""
    state = PartialState(cpu=True)
    rank, size = state.process_index, state.num_processes
    rows = torch.full((2,), float(rank), requires_grad=True)
    scalar = torch.tensor(float(rank), requires_grad=True)
    labels = torch.tensor([rank, rank])
    found = gather({"rows": rows, "labels": labels, "scalar": scalar}, differentiable=True)
    assert found["labels"].tolist() == [other for other in range(size) for _ in range(2)]
    assert not found["labels"].requires_grad
    weights = (rank + 1.0) * (1.0 + found["labels"])
    ((found["rows"] * weights).sum() + (rank + 1.0) * found["scalar"].sum()).backward()
    assert rows.grad is not None
    assert scalar.grad is not None
    return found["rows"].tolist(), rows.grad.tolist(), scalar.grad.item()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_gradients_flow_back_to_the_rank_that_a_row_came_from(size: int) -> None:
    total = sum(rank + 1.0 for rank in range(size))
    everyone = [float(rank) for rank in range(size) for _ in range(2)]
    expected = [(everyone, [total * (rank + 1.0)] * 2, total) for rank in range(size)]
    assert run_as_threads(size, gradients) == expected


def test_gradients_between_processes(two: Processes) -> None:
    assert [found[1] for found in two.run(gradients)] == [[3.0, 3.0], [6.0, 6.0]]


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "uneven all_to_all": (lambda: all_to_all({"a": torch.ones(7)}), SettingError),
    "all_to_all of a scalar": (lambda: all_to_all(torch.tensor(1.0)), SettingError),
    "all_to_all of a number": (lambda: all_to_all(3), UnknownKind),
    "uneven reduce_scatter": (lambda: reduce_scatter(torch.ones(7)), SettingError),
    "an op that there is not": (lambda: reduce_scatter(torch.ones(8), "median"), SettingError),
    "a mean of integers": (lambda: reduce_scatter(torch.arange(8), "mean"), UnknownKind),
    "a product of complex numbers": (lambda: reduce(torch.ones(2, dtype=torch.complex64), "product"), UnknownKind),
    "gradients to one rank": (lambda: gather(torch.ones(1), dst=0, differentiable=True), SettingError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_cannot_be_split_or_reduced_are_refused(name: str) -> None:
    call, kind = REFUSED[name]

    def refused() -> str:
        PartialState(cpu=True)
        with pytest.raises(kind) as raised:
            call()
        return type(raised.value).__name__

    assert run_as_threads(3, refused) == [kind.__name__] * 3
    if name != "uneven all_to_all" and name != "uneven reduce_scatter":
        refused()


def different_calls() -> str:
    state = PartialState(cpu=True)
    with pytest.raises(ShapeMismatch) as raised:
        reduce_scatter(torch.ones(3), "sum" if state.is_main_process else "max")
    return str(raised.value)


def test_ops_that_differ_are_named_on_all_ranks() -> None:
    told = set(run_as_threads(3, different_calls))
    assert len(told) == 1
    assert "op is sum on rank 0, max on ranks 1-2" in told.pop()
