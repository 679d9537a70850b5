"""Loaders that ask for the members of each optimizer step: every sample counts once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from accel_data import DataLoaderShard, SeedableRandomSampler, prepare_data_loader
from accel_state.errors import Conflict, DataError
from accel_torchft.elastic import StepMembers, StepPlan, follow_steps, share_of_batch

SEED = 7


class World:
    """What one process learns about the members, step by step; a step is made unless `failing` names its attempt."""

    def __init__(self, worlds: list[tuple[int, int]], batches: int, failing: tuple[int, ...] = ()) -> None:
        self.worlds, self.batches, self.failing = worlds, batches, failing
        self.number = self.attempt = self.asked = 0

    def begin_step(self) -> StepMembers:
        self.asked += 1
        return StepMembers(self.number, *self.worlds[min(self.attempt, len(self.worlds) - 1)], self.batches)

    def step(self, loader: DataLoaderShard) -> None:
        share = share_of_batch(loader)
        assert share is not None
        share.stepped = True
        self.number += self.attempt not in self.failing
        self.attempt += 1


def elastic(
    length: int, batch_size: int, begin_step: Callable[[], StepMembers], trains: bool = True, **how: Any
) -> DataLoaderShard:
    workers, drop_last = how.pop("workers", 0), how.pop("drop_last", False)
    plain: DataLoader[Any] = DataLoader(
        torch.arange(length),  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=drop_last,
    )
    prepared = prepare_data_loader(plain, order="global", data_seed=SEED, num_processes=1, process_index=0, **how)
    follow_steps(prepared, begin_step, lambda: trains)
    assert isinstance(prepared, DataLoaderShard)
    return prepared


def order(length: int, epoch: int = 0) -> list[int]:
    sampler = SeedableRandomSampler(range(length), data_seed=SEED)
    sampler.set_epoch(epoch)
    return list(sampler)


def read(loader: DataLoaderShard, world: World) -> Iterator[tuple[int, list[int], float]]:
    """(step, samples that count, factor) of each batch, with an attempt to step after the last batch of each step."""
    for batch in loader:
        share = share_of_batch(loader)
        assert share is not None
        yield share.step, batch.tolist()[: share.samples], share.factor
        if share.last:
            world.step(loader)


@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    batches=st.integers(1, 5),
    counts=st.lists(st.integers(1, 6), min_size=70, max_size=70),
    failing=st.sets(st.integers(0, 40), max_size=8),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_sample_counts_once_in_an_epoch(
    cpu_state: None, length: int, batch_size: int, batches: int, counts: list[int], failing: set[int]
) -> None:
    steps = len(StepPlan(length, batch_size, batches))
    made: dict[int, list[int]] = {}
    for rank in range(max(counts)):
        # A process that is not a member of an attempt reads nothing in it; here it reads as the last one, uncounted.
        worlds = [(count, min(rank, count - 1)) for count in counts]
        world = World(worlds, batches, tuple(failing))
        for step, samples, _ in read(elastic(length, batch_size, world.begin_step), world):
            if world.attempt not in failing and rank < counts[world.attempt]:
                made.setdefault(step, []).extend(samples)
        assert world.number == steps
    wanted, size = order(length), batch_size * batches
    assert {step: sorted(samples) for step, samples in made.items()} == {
        step: sorted(wanted[step * size : (step + 1) * size]) for step in range(steps)
    }


def test_a_step_has_the_same_samples_when_it_is_repeated_with_fewer_members(cpu_state: None) -> None:
    world = World([(2, 1), (1, 0), (1, 0)], batches=2, failing=(0,))
    given_out = list(read(elastic(12, 2, world.begin_step), world))
    wanted = order(12)
    assert given_out[0] == (0, wanted[2:4], 1.0)
    assert given_out[1:3] == [(0, wanted[:2], 0.5), (0, wanted[2:4], 0.5)]
    assert given_out[3][0] == 1


def test_steps_of_two_epochs_may_be_made_again(cpu_state: None) -> None:
    world = World([(1, 0)], batches=1)
    loader = elastic(6, 2, world.begin_step)
    assert [step for step, *_ in read(loader, world)] == [0, 1, 2]
    given_out = []
    for step, samples, _ in read(loader, world):
        given_out.append((step, samples))
        if len(given_out) == 2:
            world.number = 0
    first, second = order(6), order(6, 1)
    again = [(step, first[2 * step : 2 * step + 2]) for step in (1, 2)]
    assert given_out[:2] == [(3, second[:2]), (4, second[2:4])]
    assert given_out[2:] == [*again, (3, second[:2]), (4, second[2:4]), (5, second[4:])]


def test_factors_make_the_mean_over_the_members_that_of_the_step() -> None:
    plan = StepPlan(length=11, batch_size=2, batches=4)
    for count in range(1, 7):
        for step in range(len(plan)):
            shares = [plan.share(step, count, index) for index in range(count)]
            assert sum(samples for share in shares for _, samples in share) == plan.samples(step)
            assert all(shares), "every member takes part"


def test_a_process_that_joins_late_continues_where_the_others_are(cpu_state: None) -> None:
    world = World([(1, 0)], batches=1)
    world.number = 13
    loader = elastic(10, 2, world.begin_step)
    assert [list(read(loader, world)) for _ in range(2)] == [[], []], "two epochs of five steps are over"
    assert [samples for _, samples, _ in read(loader, world)] == [order(10, 2)[6:8], order(10, 2)[8:]]
    assert loader.iteration == 3


def test_an_epoch_that_was_left_is_continued(cpu_state: None) -> None:
    world = World([(1, 0)], batches=1)
    loader = elastic(10, 2, world.begin_step)
    next(batches := read(loader, world))
    next(batches)
    batches.close()
    assert [step for step, _, _ in read(loader, world)] == [1, 2, 3, 4]


def test_workers_read_what_the_loop_receives(cpu_state: None) -> None:
    world = World([(2, 0), (2, 0), (1, 0), (1, 0), (2, 1)], batches=2, failing=(1,))
    alone = World(world.worlds, batches=2, failing=(1,))
    assert list(read(elastic(20, 2, world.begin_step, workers=2), world)) == list(
        read(elastic(20, 2, alone.begin_step), alone)
    )


def test_members_are_asked_for_before_each_step_and_not_in_an_evaluation(cpu_state: None) -> None:
    world = World([(1, 0)], batches=2)
    list(read(elastic(8, 2, world.begin_step), world))
    assert world.asked == 3, "two steps, and the one after the epoch"

    loader = elastic(8, 2, world.begin_step, trains=False)
    assert [batch.tolist() for batch in loader] == [order(8)[i : i + 2] for i in range(0, 8, 2)]
    assert share_of_batch(loader) is None
    assert world.asked == 3


def test_a_global_batch_size_stays_that_of_the_script(cpu_state: None) -> None:
    world = World([(1, 0)], batches=2)
    given_out = list(read(elastic(8, 4, world.begin_step, split_batches=True), world))
    assert [(step, len(samples)) for step, samples, _ in given_out] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_generators_of_the_process_do_not_see_how_often_members_change(cpu_state: None) -> None:
    ends = []
    for worlds in ([(1, 0)], [(1, 0), (2, 1), (1, 0), (2, 0)]):
        torch.manual_seed(0)
        world = World(worlds, batches=2)
        list(read(elastic(24, 2, world.begin_step), world))
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends)


def test_a_loop_that_never_steps_is_an_error(cpu_state: None) -> None:
    world = World([(1, 0)], batches=1)
    with pytest.raises(DataError, match=r"did not step a prepared optimizer(.|\n)*model\.eval\(\)"):
        list(elastic(4, 2, world.begin_step))


def test_too_few_samples_for_a_step_are_an_error(cpu_state: None) -> None:
    world = World([(1, 0)], batches=8)
    with pytest.raises(DataError, match="It has 4 samples, but a step of the run has 16"):
        list(elastic(4, 2, world.begin_step, drop_last=True))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Numbered(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        (DataLoader(Numbers(), batch_size=2), "reads a stream"),
        (DataLoader(Numbered(), batch_size=2, sampler=WeightedRandomSampler([1.0] * 4, 4)), "more than seed and epoch"),
        (DataLoader(Numbered(), batch_size=2, shuffle=True), "more than seed and epoch"),
    ],
)
def test_loaders_without_an_order_are_refused(cpu_state: None, plain: DataLoader[Any], reason: str) -> None:
    prepared = prepare_data_loader(plain, num_processes=1, process_index=0)
    with pytest.raises(Conflict, match=reason):
        follow_steps(prepared, World([(1, 0)], 1).begin_step, lambda: True)
