"""One order of samples for any number of processes, workers and resumes; loaders that cannot keep it are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accel_data import MixtureDataset, SeedableRandomSampler, ShardPlan, prepare_data_loader
from accel_ops import gather_object
from accel_state import PartialState
from accel_state.errors import Conflict, DataError, SettingError
from accel_testing.processes import Processes
from accel_testing.streams import Stream

SEED = 7

Phase = tuple[int, int, int | None]
"""Processes, batch size of each, and steps before the run stops; None for the rest of the epoch."""


def loader_of(
    length: int, batch_size: int, epoch: int = 0, workers: int = 0, drop_last: bool = False, **how: Any
) -> Any:
    plain: DataLoader[Any] = DataLoader(
        torch.arange(length),  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=drop_last,
    )
    loader: Any = prepare_data_loader(plain, order="global", data_seed=SEED, restore_position=True, **how)
    loader.set_epoch(epoch)
    return loader


def expected(length: int, epoch: int = 0) -> list[int]:
    """The order by its definition."""
    sampler = SeedableRandomSampler(range(length), data_seed=SEED)
    sampler.set_epoch(epoch)
    return list(sampler)


def sequence(
    length: int, phases: list[Phase], epoch: int = 0, workers: Sequence[int] = (), **how: Any
) -> tuple[list[int], list[int]]:
    """The real samples of an epoch in their order, and those that were added, over runs of other sizes.

    Args:
        length: samples of the epoch.
        phases: the runs.
        epoch: its number.
        workers: of each run; none where it is left out.
        how: options of the loaders.
    """
    real: list[int] = []
    added: list[int] = []
    state: dict[str, Any] | None = None
    for (processes, batch_size, steps), each in zip_longest(phases, workers[: len(phases)], fillvalue=0):
        loaders = [
            loader_of(length, batch_size, epoch, each, num_processes=processes, process_index=index, **how)
            for index in range(processes)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        readers = [iter(loader) for loader in loaders]
        for number, batches in enumerate(zip_longest(*readers), 1):
            for index, batch in enumerate(batches):
                if batch is not None:
                    padding = loaders[index].progress.padding
                    count = None if padding is None else padding.of(index)
                    real += batch.tolist()[:count]
                    added += batch.tolist()[len(batch) if count is None else count :]
            if number == steps:
                state = loaders[0].state_dict()
                break
        for reader in readers:
            reader.close()  # type: ignore[attr-defined]
    return real, added


PHASES = st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 8]), st.integers(1, 4), st.integers(1, 3)), max_size=3)


def whole(phases: list[Phase], length: int) -> list[Phase]:
    """The phases that stop before the last step, and one that reads the rest."""
    kept, start = [], 0
    for processes, batch_size, steps in phases:
        assert steps is not None
        if start + processes * batch_size * steps >= length:
            break
        start += processes * batch_size * steps
        kept.append((processes, batch_size, steps))
    return kept


def consumed(phases: list[Phase]) -> int:
    return sum(processes * batch_size * (steps or 0) for processes, batch_size, steps in phases)


@pytest.mark.usefixtures("fresh_state")
class TestOneProcessSimulatesAll:
    @settings(deadline=None, max_examples=25)
    @given(st.integers(8, 60), st.sampled_from([1, 2, 3, 5, 8]), st.integers(1, 5), st.integers(0, 3))
    def test_the_order_is_that_of_seed_epoch_and_length(
        self, length: int, processes: int, batch_size: int, epoch: int
    ) -> None:
        real, _ = sequence(length, [(processes, batch_size, None)], epoch)
        assert real == expected(length, epoch)

    @settings(deadline=None, max_examples=25)
    @given(st.integers(8, 60), PHASES, st.sampled_from([1, 2, 3, 5, 8]), st.integers(1, 4))
    def test_after_resumes_on_other_numbers_of_processes_every_sample_comes_once_and_in_order(
        self, length: int, phases: list[Phase], processes: int, batch_size: int
    ) -> None:
        phases = whole(phases, length)
        real, added = sequence(length, [*phases, (processes, batch_size, None)], even_batches=False)
        assert (real, added) == (expected(length), [])

    @settings(deadline=None, max_examples=25)
    @given(st.integers(8, 60), PHASES, st.sampled_from([1, 2, 3, 5, 8]), st.integers(1, 4))
    def test_what_is_repeated_follows_from_the_sizes_of_the_runs(
        self, length: int, phases: list[Phase], processes: int, batch_size: int
    ) -> None:
        phases = whole(phases, length)
        real, added = sequence(length, [*phases, (processes, batch_size, None)])
        order, step = expected(length), processes * batch_size
        rest = (length - consumed(phases)) % step
        count = (step - rest) % step if processes > 1 else 0
        # The mask of `padding` leaves every sample exactly once, as an evaluation needs it.
        assert real == order
        cycle = order[: min(step, length)]
        assert added == [cycle[number % len(cycle)] for number in range(count)]
        plan = ShardPlan(length, batch_size, processes, even=processes > 1, start=consumed(phases))
        assert (plan.tail, bool(plan.padding())) == (rest, bool(count))

    @settings(deadline=None, max_examples=25)
    @given(st.integers(8, 60), PHASES, st.sampled_from([1, 2, 3, 5]), st.integers(1, 4))
    def test_what_is_dropped_follows_from_the_sizes_of_the_runs(
        self, length: int, phases: list[Phase], processes: int, batch_size: int
    ) -> None:
        phases = whole(phases, length)
        real, added = sequence(length, [*phases, (processes, batch_size, None)], drop_last=True)
        rest = (length - consumed(phases)) % (processes * batch_size)
        assert (real, added) == (expected(length)[: length - rest], [])

    # Each example starts up to 48 DataLoader workers.
    @settings(deadline=None, max_examples=5)
    @given(
        st.integers(8, 60),
        PHASES,
        st.sampled_from([1, 2, 3, 5, 8]),
        st.integers(1, 4),
        st.lists(st.sampled_from([2, 0]), min_size=4, max_size=4),
    )
    def test_workers_do_not_change_the_order(
        self, length: int, phases: list[Phase], processes: int, batch_size: int, workers: list[int]
    ) -> None:
        phases = [*whole(phases, length), (processes, batch_size, None)]
        assert sequence(length, phases, workers=workers, even_batches=False) == (expected(length), [])

    def test_the_order_is_that_of_a_seedable_sampler(self) -> None:
        plain: DataLoader[Any] = DataLoader(range(20), batch_size=3, shuffle=True)  # type: ignore[arg-type]
        seedable = prepare_data_loader(plain, use_seedable_sampler=True, data_seed=SEED)
        ordered = prepare_data_loader(plain, order="global", data_seed=SEED)
        for _ in range(2):
            assert [batch.tolist() for batch in seedable] == [batch.tolist() for batch in ordered]


class Own(Sampler[int]):
    """A sampler that is not torch's; its order depends on more than the epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class ByEpoch(Own):
    """One whose order the epoch decides; `offset` makes that of a process differ."""

    epoch, offset = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return ((number + self.epoch + self.offset) % 8 for number in range(8))


class CustomBatches(BatchSampler):
    """A batch sampler that is not torch's."""


class EpochStream(Stream):
    """A stream that knows epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.samples = range(epoch, epoch + 8)


class Files(Stream):
    """A stream that is sharded at its source."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(range(index, 8, num_shards))


DATA = range(8)
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "custom sampler": (lambda: DataLoader(DATA, sampler=Own()), {}, "no method set_epoch"),  # type: ignore[arg-type]
    "configured sampler": (
        lambda: DataLoader(DATA, shuffle=True),  # type: ignore[arg-type]
        {"use_configured_sampler": True},
        "no method set_epoch",
    ),
    "weighted sampler": (
        lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 8, 8)),  # type: ignore[arg-type]
        {},
        "no method set_epoch",
    ),
    "custom batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=CustomBatches(RandomSampler(DATA), 2, False)),  # type: ignore[arg-type]
        {},
        "whole batches",
    ),
    "DistributedSampler": (
        lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)),  # type: ignore[arg-type]
        {},
        "reads its own shard",
    ),
    "sharded stream": (lambda: DataLoader(Files(8)), {}, "reads its own shard"),
    "stream without order": (lambda: DataLoader(Stream(8)), {}, "order of the stream may not be repeatable"),
    "stream with workers": (lambda: DataLoader(EpochStream(8), num_workers=1), {}, "DataLoader workers shard"),
    "out of order": (
        lambda: DataLoader(DATA, num_workers=1, in_order=False),  # type: ignore[arg-type]
        {},
        "in_order=False",
    ),
}


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("case", REFUSED)
def test_a_loader_without_a_global_order_is_refused_when_it_is_prepared(case: str) -> None:
    make, options, obstacle = REFUSED[case]
    with pytest.raises(Conflict, match=obstacle) as refused:
        prepare_data_loader(make(), num_processes=2, process_index=0, order="global", **options)
    assert refused.value.remedy
    # Without order="global" it is prepared as before.
    prepare_data_loader(make(), num_processes=2, process_index=0, **options)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, batch_size=2, sampler=SequentialSampler(DATA)),  # type: ignore[arg-type]
        lambda: DataLoader(DATA, batch_size=2, sampler=[3, 1, 7, 5, 0, 2, 6, 4]),  # type: ignore[arg-type]
        lambda: DataLoader(DATA, batch_size=2, sampler=ByEpoch()),  # type: ignore[arg-type]
        lambda: DataLoader(EpochStream(8), batch_size=2),
    ],
    ids=["sequential", "list", "sampler with epochs", "stream with epochs"],
)
def test_orders_of_the_epoch_alone_are_accepted(make: Callable[[], Any]) -> None:
    orders = []
    for processes in (1, 2):
        loaders: list[Any] = [
            prepare_data_loader(make(), num_processes=processes, process_index=index, order="global")
            for index in range(processes)
        ]
        for loader in loaders:
            loader.set_epoch(1)
        orders.append([sample for step in zip(*loaders, strict=True) for batch in step for sample in batch.tolist()])
    assert orders[0] == orders[1]


def test_an_unknown_order_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingError, match="Did you mean 'global'"):
        prepare_data_loader(DataLoader(DATA), order="globle")  # type: ignore[arg-type]


# ---------------------------------------------------------------- real processes


def differing() -> str:
    sampler = ByEpoch()
    sampler.offset = PartialState(cpu=True).process_index
    loader = prepare_data_loader(DataLoader(DATA, batch_size=2, sampler=sampler), order="global")  # type: ignore[arg-type]
    try:
        list(loader)
    except DataError as error:
        return str(error)
    return "accepted"


def test_a_sampler_that_depends_on_the_rank_is_refused_by_every_process(two: Processes) -> None:
    for text in two.run(differing):
        assert "other indices on process 1 than on process 0" in text


def part_of_an_epoch(state: dict[str, Any] | None, steps: int | None, workers: int) -> tuple[list[int], Any]:
    """The samples of some steps, by step and rank, and the state after them."""
    PartialState(cpu=True)
    loader = loader_of(37, 2, workers=workers, even_batches=False)
    if state is not None:
        loader.load_state_dict(state)
    mine = []
    for number, batch in enumerate(loader, 1):
        mine.append(batch.tolist())
        if number == steps:
            break
    after = loader.state_dict()
    everyones = gather_object([mine])
    return [sample for step in zip_longest(*everyones, fillvalue=[]) for batch in step for sample in batch], after


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_four_to_two_to_three_processes(
    processes: Callable[[int], Processes], workers: int
) -> None:
    seen: list[int] = []
    state: Any = None
    for count, steps in ((4, 2), (2, 2), (3, None)):
        results = processes(count).run(part_of_an_epoch, state, steps, workers)
        assert all(samples == results[0][0] for samples, _ in results)
        seen += results[0][0]
        state = results[0][1]
    assert seen == expected(37)


@pytest.mark.usefixtures("fresh_state")
def test_an_epoch_of_a_mixture_goes_on_from_four_to_two_to_three_processes() -> None:
    sources = {"code": torch.arange(40), "text": torch.arange(100, 130)}
    mixture = MixtureDataset(sources, {"code": 0.7, "text": 0.3}, stop="repeat", num_samples=41)
    seen: list[int] = []
    state: Any = None
    for count, steps in ((4, 2), (2, 2), (3, None)):
        loaders: list[Any] = [
            prepare_data_loader(
                DataLoader(mixture, batch_size=2),
                num_processes=count,
                process_index=index,
                even_batches=False,
                order="global",
                restore_position=True,
            )
            for index in range(count)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for number, batches in enumerate(zip_longest(*loaders, fillvalue=torch.empty(0)), 1):
            seen += torch.cat(batches).int().tolist()
            if number == steps:
                state = loaders[0].state_dict()
                break
    plain = MixtureDataset(sources, {"code": 0.7, "text": 0.3}, stop="repeat", num_samples=41)
    assert seen == [int(sample) for sample in plain]
