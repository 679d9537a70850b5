"""The batches of one process out of those of a batch sampler, computed or enumerated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from accel_data import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from accel_state.errors import DataError, SettingError


class Listed(BatchSampler):
    """A batch sampler of somebody else's that gives fixed batches."""

    def __init__(
        self, batches: Sequence[Sequence[int]], batch_size: int | None = None, drop_last: bool = False
    ) -> None:
        self.batches = batches
        self.drop_last = drop_last
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return (list(batch) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Subclass(SequentialSampler):
    """A sampler that must not be jumped, since it could do anything."""


class Counting(Subclass):
    """Counts the indices that were read."""

    given = 0

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.given += 1
            yield index


def dealt(
    batches: list[list[int]], processes: int, split: bool, even: bool, drop_last: bool, size: int
) -> list[list[list[int]]]:
    """What every process gets, by dealing out whole or cut batches of a stock batch sampler."""
    order = list(chain.from_iterable(batches))
    width = size // processes if split else size
    step_size, result = width * processes, [[] for _ in range(processes)]  # type: list[list[list[int]]]
    for at in range(0, len(order), step_size):
        step = order[at : at + step_size]
        if len(step) < step_size and drop_last:
            continue
        while even and processes > 1 and len(step) < step_size:
            step = step + order[: step_size - len(step)]
        for process in range(processes):
            if batch := step[process * width : (process + 1) * width]:
                result[process].append(batch)
    return result


@settings(deadline=None)
@given(
    length=st.integers(1, 120),
    processes=st.integers(1, 9),
    size=st.integers(1, 6),
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
    kind=st.sampled_from(["sequential", "random", "generator", "custom sampler", "custom"]),
)
def test_all_kinds_of_samplers_are_dealt_out_alike(
    length: int, processes: int, size: int, split: bool, even: bool, drop_last: bool, kind: str
) -> None:
    size = size * processes if split else size

    def sampler() -> BatchSampler:
        torch.manual_seed(length)
        generator = torch.Generator().manual_seed(length)
        single = {
            "sequential": SequentialSampler(range(length)),
            "random": RandomSampler(range(length)),
            "generator": RandomSampler(range(length), generator=generator),
            "custom sampler": Subclass(range(length)),
            "custom": Subclass(range(length)),
        }[kind]
        stock = BatchSampler(single, size, drop_last)
        return Listed(list(stock), size, drop_last) if kind == "custom" else stock

    whole = list(sampler())
    expected = dealt(whole, processes, split, even, drop_last, size)
    for process in range(processes):
        shard = BatchSamplerShard(sampler(), processes, process, split, even)
        counted = len(shard)
        batches = list(shard)
        assert batches == expected[process]
        if not (kind == "custom" and split and not even):
            assert counted == len(batches)


@settings(deadline=None)
@given(length=st.integers(1, 60), processes=st.integers(1, 5), skip=st.integers(0, 9), split=st.booleans())
def test_skipped_steps_leave_the_rest_as_it_was(length: int, processes: int, skip: int, split: bool) -> None:
    for sampler in (SequentialSampler(range(length)), Subclass(range(length))):
        batches = BatchSampler(sampler, 2 * processes if split else 2, False)
        for known in (batches, Listed(list(batches), batches.batch_size)):
            shard = BatchSamplerShard(known, processes, processes - 1, split)
            whole = list(shard)
            assert list(shard.skipping(skip)) == whole[skip:]
            assert list(shard.skipping(1).skipping(skip)) == whole[skip + 1 :]
            assert len(shard.skipping(skip)) == len(whole[skip:])


def test_consecutive_epochs_of_a_kept_generator_are_those_of_torch() -> None:
    plain = BatchSampler(RandomSampler(range(11), generator=torch.Generator().manual_seed(3)), 2, False)
    shard = BatchSamplerShard(
        BatchSampler(RandomSampler(range(11), generator=torch.Generator().manual_seed(3)), 2, False), even_batches=False
    )
    for _ in range(3):
        assert list(shard) == list(plain)


def test_a_shuffled_epoch_draws_from_the_process_as_torch_does() -> None:
    torch.manual_seed(5)
    expected = [list(BatchSampler(RandomSampler(range(9)), 2, False)) for _ in range(2)]
    after = torch.rand(1)
    torch.manual_seed(5)
    shard = BatchSamplerShard(BatchSampler(RandomSampler(range(9)), 2, False), even_batches=False)
    assert [list(shard), list(shard)] == expected
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("count", [5, 20])
def test_draws_with_replacement_or_of_another_number_are_those_of_torch(count: int) -> None:
    def make() -> BatchSampler:
        return BatchSampler(RandomSampler(range(9), replacement=True, num_samples=count), 2, False)

    torch.manual_seed(1)
    expected = list(make())
    torch.manual_seed(1)
    assert list(BatchSamplerShard(make(), even_batches=False)) == expected


@pytest.mark.parametrize(("replacement", "count"), [(True, None), (True, 9), (True, 5), (False, 5)])
def test_seeded_draws_with_replacement_or_of_another_number_are_those_of_the_sampler(
    replacement: bool, count: int | None
) -> None:
    def make() -> BatchSampler:
        return BatchSampler(SeedableRandomSampler(range(9), replacement, count, data_seed=3), 2, False)

    assert list(BatchSamplerShard(make(), even_batches=False)) == list(make())


def test_a_batch_sampler_that_says_nothing_of_its_last_batches_loses_none() -> None:
    own = Listed([[0, 1], [2, 3], [4]], 2)
    del own.drop_last
    assert [list(BatchSamplerShard(own, 2, index)) for index in (0, 1)] == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]


def test_stock_samplers_are_not_enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(self: object) -> Iterator[int]:
        raise AssertionError("enumerated")

    for stock in (SequentialSampler, RandomSampler, SeedableRandomSampler):
        monkeypatch.setattr(stock, "__iter__", walk)
        shard = BatchSamplerShard(BatchSampler(stock(range(100)), 2, False), 3, 1)
        assert len(list(shard)) == 17


def test_custom_samplers_are_enumerated_no_further_than_needed() -> None:
    sampler = Counting(range(10_000))
    first = next(iter(BatchSamplerShard(BatchSampler(sampler, 2, False), 3, 1)))
    assert first == [2, 3]
    assert sampler.given <= 12


def test_samplers_without_a_rule_of_their_own_give_all_they_have() -> None:
    shard = BatchSamplerShard(BatchSampler(SubsetRandomSampler(range(4)), 3, False), even_batches=False)
    assert sorted(chain.from_iterable(shard)) == [0, 1, 2, 3]


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("even", [True, False])
def test_batches_of_any_size_are_all_handed_out(processes: int, even: bool) -> None:
    batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10]]
    shards = [BatchSamplerShard(Listed(batches), processes, process, False, even) for process in range(processes)]
    given = [list(shard) for shard in shards]
    assert [len(batches) for batches in given] == [len(shard) for shard in shards]
    real = []
    for process, shard in enumerate(shards):
        for number, batch in enumerate(given[process]):
            padding = shard.padded.get(number)
            real += batch if padding is None else batch[: padding.of(process)]
    assert sorted(real) == list(range(11))
    if even:
        assert len({len(batches) for batches in given}) == 1


def test_a_short_last_batch_of_a_custom_sampler_is_filled_up_and_marked() -> None:
    shards = [BatchSamplerShard(Listed([[0, 1], [2, 3], [4]], 2), 2, process) for process in range(2)]
    assert [list(shard) for shard in shards] == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    padding = shards[0].padded[1]
    assert [padding.of(0), padding.of(1)] == [1, 0]


def test_cut_batches_of_a_custom_sampler_may_be_short_anywhere() -> None:
    shards = [BatchSamplerShard(Listed([[0, 1, 2, 3], [4, 5, 6], [7]], 4), 2, process, True) for process in range(2)]
    assert [list(shard) for shard in shards] == [[[0, 1], [4, 5], [7, 0]], [[2, 3], [6, 0], [1, 2]]]
    assert {number: padding.total for number, padding in shards[1].padded.items()} == {1: 3, 2: 1}


@pytest.mark.parametrize("processes", [2, 3])
def test_short_batches_anywhere_are_completed_if_the_sampler_has_a_batch_size(processes: int) -> None:
    batches = [[0, 1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    shards = [BatchSamplerShard(Listed(batches, 4), processes, process) for process in range(processes)]
    steps = list(zip(*shards, strict=True))
    assert all(len(batch) == 4 for step in steps for batch in step)
    real = [
        batch[: shard.padded[number].of(process)] if number in shard.padded else batch
        for number, step in enumerate(steps)
        for process, (shard, batch) in enumerate(zip(shards, step, strict=True))
    ]
    assert sorted(chain.from_iterable(real)) == list(range(11))


@pytest.mark.parametrize("samples", range(9, 17))
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_length_of_a_shard_is_what_it_yields_of_split_batches(samples: int, drop_last: bool) -> None:
    class Own(BatchSampler):
        """A batch sampler of the script, with batches like those of torch."""

    for processes in (1, 2, 4):
        for even in (True, False):
            for process in range(processes):
                shard = BatchSamplerShard(Own(range(samples), 8, drop_last), processes, process, True, even)
                assert len(shard) == len(list(shard)), (processes, process, even)
                assert shard.steps_of(process) == len(list(shard))


def test_a_batch_larger_than_promised_is_refused() -> None:
    with pytest.raises(DataError, match="largest batch"):
        list(BatchSamplerShard(Listed([[0, 1, 2]], 2), 2, 0, True))


@pytest.mark.parametrize(
    "arguments",
    [
        (BatchSampler(range(10), 3, False), 2, 0, True),
        (Listed([[0, 1]]), 2, 0, True),
        (BatchSampler(range(10), 3, False), 2, 2),
        (BatchSampler(range(10), 3, False), 0, 0),
        (BatchSampler(range(10), 3, False), 2, -1),
    ],
)
def test_impossible_shards_are_refused(arguments: tuple[BatchSampler, int, int]) -> None:
    with pytest.raises(SettingError):
        BatchSamplerShard(*arguments)


def test_no_samples_are_no_batches() -> None:
    assert [list(BatchSamplerShard(BatchSampler([], 3, False), 2, process)) for process in range(2)] == [[], []]


def test_seed_and_epoch_alone_decide_the_order() -> None:
    sampler = SeedableRandomSampler(range(10), data_seed=42)
    first, second = list(sampler), list(sampler)
    assert first == torch.randperm(10, generator=torch.Generator().manual_seed(42)).tolist()
    assert second == torch.randperm(10, generator=torch.Generator().manual_seed(43)).tolist()
    sampler.set_epoch(0)
    random.seed(1)
    torch.manual_seed(1)
    assert list(sampler) == first
    seeded = SeedableRandomSampler(range(10), data_seed=42)
    shard = BatchSamplerShard(BatchSampler(seeded, 5, False))
    assert [list(chain.from_iterable(shard)) for _ in range(2)] == [first, second]


def test_the_global_order_does_not_depend_on_the_number_of_processes() -> None:
    for processes, size in [(1, 8), (2, 4), (4, 2), (8, 1)]:
        shards = [
            BatchSamplerShard(BatchSampler(SeedableRandomSampler(range(40), data_seed=7), size, False), processes, r)
            for r in range(processes)
        ]
        steps = zip(*shards, strict=True)
        order = [index for step in steps for batch in step for index in batch]
        assert order == torch.randperm(40, generator=torch.Generator().manual_seed(7)).tolist()


def test_the_seed_is_that_of_torch_when_none_is_given() -> None:
    torch.manual_seed(7)
    assert SeedableRandomSampler(range(3)).initial_seed == 7


@pytest.mark.parametrize("skip", [0, 2, 9])
def test_skipping_any_batch_sampler(skip: int) -> None:
    stock = BatchSampler(range(11), 2, False)
    for sampler in (stock, Listed(list(stock)), BatchSamplerShard(stock, 2, 1)):
        whole = list(sampler)
        skipping = SkipBatchSampler(sampler, skip)
        assert list(skipping) == whole[skip:]
        assert len(skipping) == len(whole[skip:])
        assert skipping.total_length == len(whole)
