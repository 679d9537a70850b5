"""Loaders with exact epochs: every sample once, stand-ins where a process has none, and resuming elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from accel_data import PackedDataset, PreparedLoader, SeedableRandomSampler, TokenBatches, prepare_data_loader
from accel_state import PartialState
from accel_state.errors import CheckpointError, DataError, SettingError
from accel_testing.processes import Processes


def as_list(samples: list[Any]) -> list[Any]:
    return samples


class Plain(Dataset[int]):
    """A data set of its own indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Texts(Dataset[Any]):
    """Samples for packing whose tokens are their index."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return {"ids": torch.full((self.lengths[index],), index)}


class Words(IterableDataset[int]):
    """A stream of numbers, whose length is 1 + number % 7."""

    def __init__(self, count: int) -> None:
        self.count = count

    def set_epoch(self, epoch: int) -> None:
        """The same samples in each epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def length_of(number: int) -> int:
    return 1 + number % 7


class Custom(BatchSampler):
    """A batch sampler that is not torch's."""


LENGTHS = [1 + index * 5 % 13 for index in range(90)]


def plain_loader(kind: str) -> DataLoader[Any]:
    if kind == "packed":
        return DataLoader(PackedDataset(Texts(LENGTHS), LENGTHS, 24), collate_fn=as_list)
    if kind == "custom":
        sampler = Custom(SeedableRandomSampler(range(90), data_seed=5), 4, False)
        return DataLoader(Plain(90), batch_sampler=sampler, collate_fn=as_list)
    return DataLoader(Plain(90), batch_size=4, shuffle=True, collate_fn=as_list)


def prepared(kind: str, processes: int, index: int) -> PreparedLoader:
    loader = prepare_data_loader(
        plain_loader(kind),
        num_processes=processes,
        process_index=index,
        exact_epochs=True,
        restore_position=True,
        use_seedable_sampler=True,
        data_seed=5,
    )
    assert isinstance(loader, PreparedLoader)
    return loader


def ids_in(batch: list[Any], loader: PreparedLoader) -> list[int]:
    if loader.is_stand_in:
        return []
    return list(chain.from_iterable(one["ids"].unique().tolist() if isinstance(one, dict) else [one] for one in batch))


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["map", "packed", "custom"])
def test_every_sample_counts_once_in_equally_many_steps(kind: str, processes: int) -> None:
    seen: list[int] = []
    steps = set()
    for index in range(processes):
        loader = prepared(kind, processes, index)
        batches = [ids_in(batch, loader) for batch in loader]
        steps.add((len(batches), len(loader)))
        seen += chain.from_iterable(batches)
    assert len(steps) == 1
    assert len(set(steps.pop())) == 1
    assert sorted(seen) == list(range(90))


@pytest.mark.parametrize("kind", ["map", "packed"])
@pytest.mark.parametrize("worlds", [[(4, 2), (2, 3), (3, 0)], [(1, 5), (3, 2), (2, 0)]])
def test_a_run_resumes_on_other_numbers_of_processes(kind: str, worlds: list[tuple[int, int]]) -> None:
    seen: list[int] = []
    state: Any = None
    for processes, steps in worlds:
        states = []
        for index in range(processes):
            loader = prepared(kind, processes, index)
            if state is not None:
                loader.load_state_dict(state)
            for number, batch in enumerate(loader, 1):
                seen += ids_in(batch, loader)
                if number == steps:
                    states.append(loader._state())
                    break
        state = states[0] if states else None
    assert sorted(seen) == list(range(90))


def test_batches_of_a_custom_sampler_have_no_position_elsewhere() -> None:
    loader = prepared("custom", 2, 0)
    next(iter(loader))
    state = loader._state()
    with pytest.raises(CheckpointError, match="on 2 processes"):
        prepared("custom", 3, 0).load_state_dict(state)


def test_weights_of_a_step_are_its_samples() -> None:
    weights = []
    for index in range(3):
        loader = prepared("packed", 3, index)
        weights.append([loader.step_weights for _ in loader])
    packed = PackedDataset(Texts(LENGTHS), LENGTHS, 24)
    for (*own,) in zip(*weights, strict=True):
        assert len({total for _, total in own}) == 1
        assert sum(weight for weight, _ in own) == own[0][1]
    assert sum(step[0][1] for step in zip(*weights, strict=True)) == 90 == sum(packed.sample_counts)
    loader = prepared("map", 4, 3)
    # 90 samples: five steps of 16, and one of 10, of which the last process has none.
    assert [loader.step_weights for _ in loader] == [(4, 16)] * 5 + [(0, 10)]


def test_the_counts_of_an_epoch_are_dropped_when_they_are_read() -> None:
    loader = prepared("packed", 2, 0)
    held = [len(loader.source.padded) for _ in loader]
    assert len(held) > 10
    assert max(held) <= 2


def token_batches(sharded: bool, exact: bool) -> list[tuple[int, list[int]]]:
    """For each batch, the tokens with padding, and the samples, of a stream of 100."""
    state = PartialState(cpu=True)
    stream = TokenBatches(Sharded(100) if sharded else Words(100), length_of, 20, buffer=30)
    loader: Any = prepare_data_loader(
        DataLoader(stream, batch_size=None, collate_fn=as_list),
        exact_epochs=exact,
        num_processes=state.num_processes,
        process_index=state.process_index,
    )
    found = []
    for _ in range(2):
        for batch in loader:
            real = [] if loader.is_stand_in else batch
            found.append((len(batch) * max(map(length_of, batch)), real))
    return found


class Sharded(Words):
    """The same, of which each process reads every n-th."""

    def __init__(self, count: int, rank: int = 0, world: int = 1) -> None:
        super().__init__(count)
        self.rank, self.world = rank, world

    def split_by_node(self, rank: int, world: int) -> Sharded:
        # The first process has fewer samples than the others.
        return Sharded(self.count, rank, world)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.count, self.world))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_streams_of_token_batches_agree_on_their_steps(
    processes: Callable[[int], Processes], count: int, sharded: bool, exact: bool
) -> None:
    found = processes(count).run(token_batches, sharded, exact)
    assert len({len(batches) for batches in found}) == 1
    assert max(tokens for batches in found for tokens, _ in batches) <= 20
    assert sorted(sample for batches in found for _, real in batches for sample in real) == sorted(2 * [*range(100)])
    assert [real for _, real in found[0][: len(found[0]) // 2]] != [real for _, real in found[0][len(found[0]) // 2 :]]


def test_a_stream_in_plain_torch() -> None:
    stream = TokenBatches(Words(50), length_of, 12, buffer=20, padded=False, shuffle=False)
    batches = list(DataLoader(stream, batch_size=None, collate_fn=as_list))
    assert sorted(chain.from_iterable(batches)) == list(range(50))
    assert max(sum(map(length_of, batch)) for batch in batches) <= 12
    with pytest.raises(DataError, match="Sample 2 of the stream has a length of 7"):
        list(TokenBatches(range(27, 30), lambda number: 7 if number == 29 else 1, 6))
    with pytest.raises(SettingError, match="buffer=0"):
        TokenBatches([], len, 5, buffer=0)
