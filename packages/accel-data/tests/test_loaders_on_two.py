"""Prepared loaders on two real processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

from accel_data import drop_padding, prepare_data_loader, skip_first_batches
from accel_state import PartialState
from accel_testing.processes import Processes


def epochs(seed_differs: bool, seedable: bool, kind: str, rng_types: list[str] | None) -> list[list[int]]:
    state = PartialState(cpu=True)
    torch.manual_seed(state.process_index if seed_differs else 0)
    data = range(13)
    sampler = {"shuffle": RandomSampler(data), "subset": SubsetRandomSampler(data)}[kind]
    plain = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    loader: Any = prepare_data_loader(plain, use_seedable_sampler=seedable, rng_types=rng_types)
    result = []
    for _ in range(2):
        real: list[int] = []
        for batch in loader:
            padding = loader.progress.padding
            real += batch.tolist() if padding is None else batch[: padding.of(state.process_index)].tolist()
        result.append(real)
    return result


def all_epochs(cases: list[tuple[bool, bool, str, list[str] | None]]) -> list[list[list[int]]]:
    return [epochs(*case) for case in cases]


def test_every_sample_once_whatever_the_seeds(two: Processes) -> None:
    samplers = [(False, "shuffle"), (True, "shuffle"), (False, "subset")]
    rng_types = [None, ["generator"], ["torch", "generator"]]
    cases = [(differs, *sampler, kinds) for differs in (False, True) for sampler in samplers for kinds in rng_types]
    for case, first, second in zip(cases, *two.run(all_epochs, cases), strict=True):
        for epoch in range(2):
            assert sorted(first[epoch] + second[epoch]) == list(range(13)), case
        assert first[0] != first[1], case


def diverging() -> list[list[int]]:
    state = PartialState(cpu=True)
    loader: Any = prepare_data_loader(DataLoader(range(8), batch_size=2, shuffle=True), rng_types=["generator"])
    list(loader)
    loader.get_sampler().generator.manual_seed(state.process_index)
    return [batch.tolist() for batch in loader]


def test_generators_are_made_equal_when_an_epoch_begins(two: Processes) -> None:
    first, second = two.run(diverging)
    assert sorted(chain.from_iterable(first + second)) == list(range(8))


class Drawing(IterableDataset[int]):
    """Draws its samples from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=self.generator).tolist())


def drawn_streams() -> list[list[int]]:
    stream = Drawing(PartialState(cpu=True).process_index)
    loader: Any = prepare_data_loader(DataLoader(stream, batch_size=2), rng_types=["generator"], dispatch_batches=False)
    return [batch.tolist() for batch in loader]


def test_the_generator_of_a_stream_is_made_equal_too(two: Processes) -> None:
    first, second = two.run(drawn_streams)
    assert sorted(chain.from_iterable(first + second)) == list(range(8))


def gathered_like_metrics() -> list[int]:
    from accel_ops import gather

    PartialState(cpu=True)
    loader: Any = prepare_data_loader(DataLoader(range(11), batch_size=2))
    kept: list[int] = []
    for batch in loader:
        kept += drop_padding(gather(batch), loader.progress.padding).tolist()
    return kept


def test_evaluation_sees_every_sample_once_in_order(two: Processes) -> None:
    assert two.run(gathered_like_metrics) == [list(range(11))] * 2


def resume(steps: int, by_hand: bool) -> tuple[list[list[int]], list[list[int]]]:
    state = PartialState(cpu=True)
    torch.manual_seed(state.process_index)

    def make() -> Any:
        plain = DataLoader(range(17), batch_size=2, shuffle=True)
        return prepare_data_loader(plain, rng_types=["generator"], restore_position=not by_hand)

    loader = make()
    list(loader)
    rest, saved = [], None
    for number, batch in enumerate(loader, 1):
        if number > steps:
            rest.append(batch.tolist())
        if number == steps:
            saved = loader.state_dict()
    assert saved is not None
    rest += [batch.tolist() for batch in loader]
    again = make()
    again.load_state_dict(saved)
    first = skip_first_batches(again, steps) if by_hand else again
    return rest, [batch.tolist() for batch in first] + [batch.tolist() for batch in again]


def all_resumes() -> list[tuple[list[list[int]], list[list[int]]]]:
    return [resume(steps, by_hand) for steps in range(1, 6) for by_hand in (False, True)]


def test_a_resumed_epoch_goes_on_as_it_would_have(two: Processes) -> None:
    for results in two.run(all_resumes):
        assert len(results) == 10
        for expected, resumed in results:
            assert resumed == expected != []
