"""Sharding by arithmetic against a plain walk over the whole order."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_data.sharding import ShardPlan


def enumerated(plan: ShardPlan) -> list[list[list[int]]]:
    """Batches of every process, made by dealing out the positions one after another."""
    order = list(range(plan.length))
    left = order[plan.start :]
    dealt: list[list[list[int]]] = [[] for _ in range(plan.processes)]
    while left:
        step, left = left[: plan.step_size], left[plan.step_size :]
        if len(step) < plan.step_size:
            if plan.drop_last:
                break
            while plan.even and len(step) < plan.step_size:
                step = step + order[: plan.step_size - len(step)]
        for process in range(plan.processes):
            batch = step[process * plan.batch_size : (process + 1) * plan.batch_size]
            if batch:
                dealt[process].append(batch)
    return dealt


sizes = st.integers(min_value=0, max_value=300)


@settings(deadline=None)
@given(
    length=sizes,
    batch_size=st.integers(1, 9),
    processes=st.integers(1, 12),
    even=st.booleans(),
    drop_last=st.booleans(),
    start=sizes,
)
def test_every_process_gets_what_dealing_out_would_give_it(
    length: int, batch_size: int, processes: int, even: bool, drop_last: bool, start: int
) -> None:
    plans = [ShardPlan(length, batch_size, processes, index, even, drop_last, start) for index in range(processes)]
    expected = enumerated(plans[0])
    for plan, batches in zip(plans, expected, strict=True):
        assert [plan.positions(step) for step in range(len(plan))] == batches


@settings(deadline=None)
@given(
    length=st.integers(0, 100_000),
    batch_size=st.integers(1, 64),
    processes=st.integers(1, 10_000),
    index=st.integers(0, 9_999),
)
def test_the_padding_says_how_many_samples_of_the_last_step_are_real(
    length: int, batch_size: int, processes: int, index: int
) -> None:
    index %= processes
    plan = ShardPlan(length, batch_size, processes, index)
    padding = plan.padding()
    if padding is None:
        assert length % plan.step_size == 0
        return
    last = plan.positions(len(plan) - 1)
    first = plan.full_steps * plan.step_size + index * batch_size
    real = padding.of(index)
    assert real is not None
    assert last[:real] == list(range(first, first + real))
    assert len(last) == batch_size
    assert sum(padding.of(process) or 0 for process in range(processes)) == length % plan.step_size


@settings(deadline=None)
@given(length=st.integers(1, 3_000), batch_size=st.integers(1, 8), processes=st.integers(1, 10_000))
def test_all_processes_together_see_every_sample_once_and_the_padding_beside(
    length: int, batch_size: int, processes: int
) -> None:
    plans = [ShardPlan(length, batch_size, processes, index) for index in range(min(processes, 40))]
    covered = min(len(plans) * batch_size, length)
    seen: list[int] = []
    for plan in plans:
        padding = plan.padding()
        for step in range(len(plan)):
            positions = plan.positions(step)
            real = padding.of(plan.index) if padding is not None and step == plan.full_steps else batch_size
            seen += positions[:real]
    assert len(seen) == len(set(seen))
    if processes <= 40:
        assert sorted(seen) == list(range(length))
    else:
        assert set(range(covered)) <= set(seen)


@pytest.mark.parametrize(("length", "start"), [(0, 0), (5, 5), (5, 9)])
def test_shard_plan_from_the_end_has_no_step(length: int, start: int) -> None:
    assert len(ShardPlan(length, 2, 3, 1, start=start)) == 0


@settings(deadline=None)
@given(length=st.integers(1, 200), first=st.integers(1, 8), second=st.integers(1, 8), steps=st.integers(0, 5))
def test_a_different_number_of_processes_continues_with_the_rest(
    length: int, first: int, second: int, steps: int
) -> None:
    before = [ShardPlan(length, 2, first, index) for index in range(first)]
    steps = min(steps, before[0].full_steps)
    gone = chain.from_iterable(plan.positions(step) for step in range(steps) for plan in before)
    after = [ShardPlan(length, 3, second, index, even=False, start=steps * 2 * first) for index in range(second)]
    rest = chain.from_iterable(plan.positions(step) for plan in after for step in range(len(plan)))
    assert sorted([*gone, *rest]) == list(range(length))
