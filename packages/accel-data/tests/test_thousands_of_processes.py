"""Samplers and streams divided between up to 10,000 played processes: every sample once, or filled up as promised."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accel_data import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from accel_data.dispatch import global_steps
from accel_data.sharding import ShardPlan
from accel_testing.streams import Stream

KINDS = ("sequential", "random", "seedable", "replacement", "custom sampler", "custom")


class CustomSampler(SequentialSampler):
    """A sampler that has to be enumerated."""


class Custom(BatchSampler):
    """A batch sampler that has to be enumerated."""


def batches_of(kind: str, length: int, size: int, drop_last: bool) -> BatchSampler:
    """A batch sampler that gives the same in every process."""
    data, generator = range(length), torch.Generator().manual_seed(length)
    sampler: Any = {
        "sequential": lambda: SequentialSampler(data),
        "random": lambda: RandomSampler(data, generator=generator),
        "seedable": lambda: SeedableRandomSampler(data, data_seed=length),
        "replacement": lambda: RandomSampler(data, replacement=True, num_samples=length + 3, generator=generator),
        "custom sampler": lambda: CustomSampler(data),
        "custom": lambda: SequentialSampler(data),
    }[kind]()
    return (Custom if kind == "custom" else BatchSampler)(sampler, size, drop_last)


def part_of(order: list[int], width: int, processes: int, index: int, even: bool, drop_last: bool) -> list[list[int]]:
    """What one process gets of an order: the words of the promise, sample by sample."""
    step, parts = width * processes, []
    for begin in range(0, len(order), step):
        complete = begin + step <= len(order)
        if not complete and drop_last:
            break
        places = range(begin + index * width, begin + (index + 1) * width)
        if not complete and even and processes > 1:
            # The last step goes on with what the first step began with, again and again.
            first = order[:step]
            parts.append([order[at] if at < len(order) else first[(at - len(order)) % len(first)] for at in places])
        elif batch := [order[at] for at in places if at < len(order)]:
            parts.append(batch)
    return parts


@st.composite
def divisions(draw: st.DrawFn) -> dict[str, Any]:
    processes = draw(st.one_of(st.integers(1, 16), st.integers(1, 10_000)))
    width = draw(st.integers(1, 8))
    length = draw(st.one_of(st.integers(1, 60), st.integers(1, 4 * width * min(processes, 1_000))))
    last = min(-(-length // width), processes) - 1
    indices = {0, last, min(last + 1, processes - 1), processes - 1, draw(st.integers(0, processes - 1))}
    return {
        "length": length,
        "processes": processes,
        "width": width,
        "indices": sorted(indices),
        "split": draw(st.booleans()),
        "even": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None)
@given(how=divisions(), kind=st.sampled_from(KINDS))
def test_batch_sampler_shards_of_thousands_of_processes(how: dict[str, Any], kind: str) -> None:
    length, processes, width = how["length"], how["processes"], how["width"]
    split, even, drop_last = how["split"], how["even"], how["drop_last"]
    size = width * processes if split else width
    order = list(chain.from_iterable(batches_of(kind, length, size, False)))
    for index in how["indices"]:
        shard = BatchSamplerShard(batches_of(kind, length, size, drop_last), processes, index, split, even)
        given_out = list(shard)
        assert given_out == part_of(order, width, processes, index, even, drop_last)
        for number, padding in shard.padded.items():
            real = padding.of(index)
            start = number * width * processes + index * width
            assert given_out[number][:real] == order[start : start + width]


@settings(max_examples=40, deadline=None)
@given(how=divisions(), skip=st.integers(0, 3))
def test_stream_shards_of_thousands_of_processes(how: dict[str, Any], skip: int) -> None:
    length, processes, width = how["length"], how["processes"], how["width"]
    split, even, drop_last = how["split"], how["even"], how["drop_last"]
    size = width * processes if split else width
    for index in how["indices"]:
        shard = IterableDatasetShard(Stream(length), size, drop_last, processes, index, split, even_batches=even)
        expected = part_of(list(range(length)), width, processes, index, even, drop_last)
        assert list(shard) == list(chain.from_iterable(expected))
        shard.skipped_samples = skip * width * processes
        assert list(shard) == list(chain.from_iterable(expected[skip:]))


@settings(max_examples=20, deadline=None)
@given(
    processes=st.one_of(st.integers(1, 8), st.integers(1, 10_000)),
    size=st.integers(1, 4),
    batches=st.integers(1, 40),
    last=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_what_the_main_process_reads_for_all(
    processes: int, size: int, batches: int, last: int, drop_last: bool
) -> None:
    samples = torch.arange((batches - 1) * size + min(last, size))
    real: list[int] = []
    for step in global_steps(iter(samples.split(size)), processes, False, drop_last):
        assert len(step.batches) == processes
        for index, part in enumerate(step.batches):
            real += part[: len(part) if step.padding is None else step.padding.of(index)].tolist()
        if step.padding is not None:
            assert len({len(part) for part in step.batches}) == 1
    dropped = len(real) if drop_last and batches % processes else len(samples)
    assert real == samples[:dropped].tolist()
    assert len(samples) - len(real) < size * processes


@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 30_000), width=st.integers(1, 8), processes=st.integers(5_000, 10_000))
def test_all_of_thousands_together(length: int, width: int, processes: int) -> None:
    plan = ShardPlan(length, width, processes)
    seen = torch.zeros(length, dtype=torch.int64)
    for index in range(processes):
        shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(length)), width, False), processes, index)
        for number, batch in enumerate(shard):
            padding = shard.padded.get(number)
            real = len(batch) if padding is None else padding.of(index)
            seen[batch[:real]] += 1
            assert len(batch) == width
        assert len(shard) == len(plan)
    assert seen.eq(1).all()


@pytest.mark.parametrize("kind", ["seedable", "random"])
def test_a_shuffled_epoch_of_thousands(kind: str) -> None:
    length, width, processes = 23_457, 2, 10_000
    whole = list(chain.from_iterable(batches_of(kind, length, width, False)))
    assert sorted(whole) == list(range(length))
    for index in (0, 1, 1_728, 1_729, 9_999):
        shard = BatchSamplerShard(batches_of(kind, length, width, False), processes, index)
        assert list(shard) == part_of(whole, width, processes, index, True, False)


@settings(deadline=None)
@given(length=st.integers(1, 500), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**20))
def test_seed_and_epoch_give_a_permutation(length: int, seed: int, epoch: int) -> None:
    sampler = SeedableRandomSampler(range(length), data_seed=seed)
    sampler.set_epoch(epoch)
    first = list(sampler)
    assert sorted(first) == list(range(length))
    sampler.set_epoch(epoch)
    assert list(sampler) == first
