"""`reduce` to the maximum and minimum of all processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel_ops import reduce
from accel_state import PartialState
from accel_state.errors import SettingError, UnknownKind
from accel_testing.processes import Processes

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
)
SIZES = ((), (3,), (0,), (300, 300))


@pytest.fixture(scope="module", params=[1, 2, 3])
def group(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param) as group:
        yield group


def values_of(rank: int, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.randint(0, 2 if dtype is torch.bool else 100, size, generator=torch.Generator().manual_seed(rank))
    return drawn.to(dtype)


def extremes(dtypes: list[torch.dtype], op: str) -> None:
    state = PartialState(cpu=True)
    cases = [(dtype, size) for dtype in dtypes for size in SIZES]
    given = [values_of(state.process_index, *case) for case in cases]
    kept = [tensor.clone() for tensor in given]
    for found, case in zip(reduce(given, op), cases, strict=True):
        everyones = torch.stack([values_of(rank, *case) for rank in range(state.num_processes)])
        expected = everyones.amax(0) if op == "max" else everyones.amin(0)
        assert found.dtype is case[0]
        assert found.equal(expected), case
    assert all(now.equal(before) for now, before in zip(given, kept, strict=True))


@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_of_every_dtype_and_size(group: Processes, op: str) -> None:
    group.run(extremes, list(DTYPES), op)
    for dtype in DTYPES:
        group.run(extremes, [dtype], op)


def spoilt(count: int, rank_with_nan: int) -> Any:
    state = PartialState(cpu=True)
    mine = torch.full((count,), float(state.process_index))
    if state.process_index == rank_with_nan % state.num_processes:
        mine[0] = math.nan
    results = {name: reduce(mine, name) for name in ("max", "min")}
    assert all(result[0].isnan() and not result[1:].isnan().any() for result in results.values())
    return {name: float(result[1]) for name, result in results.items()}


@pytest.mark.parametrize("count", [2, 200_000])
@pytest.mark.parametrize("rank", [0, 1])
def test_nan_of_one_process_is_seen_by_all(group: Processes, count: int, rank: int) -> None:
    answers = group.run(spoilt, count, rank)
    assert answers == [{"max": len(answers) - 1, "min": 0}] * len(answers)


def scaled() -> float:
    state = PartialState(cpu=True)
    return float(reduce(torch.tensor(state.process_index + 1.0), "max", scale=0.5))


def test_the_maximum_is_scaled(group: Processes) -> None:
    answers = group.run(scaled)
    assert answers == [len(answers) / 2] * len(answers)


def refused(op: str, dtype: torch.dtype, scale: float) -> str:
    PartialState(cpu=True)
    try:
        reduce(torch.ones(2).to(dtype), op, scale=scale)
    except (SettingError, UnknownKind) as error:
        return f"{error.obstacle} {error.remedy}"
    return "nothing was raised"


def test_extremes_refuse_complex_tensors_scaled_integers_and_unknown_ops() -> None:
    with Processes(2) as two:
        assert all("no order" in told for told in two.run(refused, "max", torch.complex64, 1.0))
        assert all("torch.int64" in told for told in two.run(refused, "min", torch.int64, 0.5))
        assert all("'max', 'min'" in told for told in two.run(refused, "median", torch.float32, 1.0))
