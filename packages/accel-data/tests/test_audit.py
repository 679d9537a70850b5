"""Every sample once: all combinations of options with processes played by one, every pair of options on real ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from accel_data import audit, prepare_data_loader
from accel_state import GradientState, PartialState
from accel_state.errors import UnknownKind
from accel_state.testing.fresh import fresh
from accel_state.testing.processes import Processes


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as group:
        yield group


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as group:
        yield group


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(index) for index in range(self.length))


class Files(Stream):
    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Files:
        part = Files(self.length)
        part.begin, part.step = index, num_shards
        return part

    begin, step = 0, 1

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(index) for index in range(self.begin, self.length, self.step))


class Walked(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


class Custom(BatchSampler):
    """Batches of somebody else's batch sampler."""


OPTIONS: dict[str, tuple[Any, ...]] = {
    "data": ("indices", "stream", "files"),
    "sampler": ("sequential", "shuffled", "walked", "custom"),
    "length": (5, 24, 29),
    "batch_size": (4, None),
    "drop_last": (False, True),
    "split_batches": (False, True),
    "even_batches": (True, False),
    "dispatch_batches": (None, True, False),
    "use_seedable_sampler": (False, True),
    "workers": (0, 1),
    "seed_samples": (False, True),
}


def possible(case: dict[str, Any]) -> bool:
    """Whether torch's loader, or `split_batches`, can do this at all."""
    single = case["batch_size"] is None
    if single and (case["drop_last"] or case["split_batches"] or case["sampler"] == "custom"):
        return False
    if case["data"] != "indices" and case["sampler"] != "sequential":
        return False
    return not (case["data"] == "files" and case["length"] < 8)


def pairs() -> list[dict[str, Any]]:
    """Cases in which every pair of values of two options meets, as far as it is possible."""
    first = {name: values[0] for name, values in OPTIONS.items()}
    cases, met = [], set()
    for (one, ones), (other, others) in combinations(OPTIONS.items(), 2):
        for value, another in product(ones, others):
            case = first | {one: value, other: another}
            if possible(case) and tuple(case.values()) not in met:
                met.add(tuple(case.values()))
                cases.append(case)
    return cases


def prepared(case: dict[str, Any], **place: Any) -> Any:
    length, size = case["length"], case["batch_size"]
    how: dict[str, Any] = {"num_workers": case["workers"]}
    data: Any = {"indices": range(length), "stream": Stream(length), "files": Files(length)}[case["data"]]
    if case["sampler"] == "custom":
        how["batch_sampler"] = Custom(RandomSampler(data), size, case["drop_last"])
    else:
        how |= {"batch_size": size, "drop_last": case["drop_last"]}
        how |= {"shuffle": True} if case["sampler"] == "shuffled" else {}
        how |= {"sampler": Walked(length)} if case["sampler"] == "walked" else {}
    names = ("split_batches", "even_batches", "dispatch_batches", "use_seedable_sampler", "seed_samples")
    options = {name: case[name] for name in names}
    return prepare_data_loader(DataLoader(data, **how), data_seed=3, put_on_device=True, **options, **place)


def expected(case: dict[str, Any], processes: int) -> tuple[int, bool]:
    """Number of samples that come, and whether the last step may be filled up."""
    size = case["batch_size"] or 1
    step = size if case["split_batches"] else size * processes
    dropped = case["length"] % step if case["drop_last"] else 0
    dispatches = case["dispatch_batches"] or (case["dispatch_batches"] is None and case["data"] == "stream")
    return case["length"] - dropped, case["even_batches"] or dispatches


@pytest.mark.slow
def test_the_product_of_all_options_with_processes_played_by_one() -> None:
    cases = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    alone = [
        case
        for case in cases
        if possible(case) and not case["dispatch_batches"] and not case["workers"] and case["data"] != "files"
        # What shuffles otherwise is not touched by this option.
        if case["sampler"] == "shuffled" or not case["use_seedable_sampler"]
    ]
    assert len(alone) > 300
    with fresh():
        for case, processes in product(alone, (1, 2, 4)):
            loaders = []
            for index in range(processes):
                torch.manual_seed(0)
                loaders.append(prepared(case, num_processes=processes, process_index=index))
            found = audit(*loaders)
            total, fills = expected(case, processes)
            assert not found.twice, case
            assert sum(found.per_process) == total, case
            assert fills or not found.added


def audited(cases: list[dict[str, Any]]) -> list[tuple[Any, list[Any]]]:
    state = PartialState(cpu=True)
    results = []
    for case in cases:
        torch.manual_seed(state.process_index)
        loader = prepared(case)
        loader.set_epoch(1)
        before = torch.get_rng_state(), loader.state_dict()["draw"]
        found = audit(loader)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert str(loader.state_dict()["draw"]) == str(before[1])
        assert not GradientState().in_dataloader
        given = []
        for batch in loader:
            padding = loader.progress.padding
            real = None if padding is None else padding.of(state.process_index)
            given += torch.as_tensor(batch).reshape(-1).tolist()[:real]
        results.append((found, given))
    return results


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_pair_of_options_on_real_processes(two: Processes, four: Processes, count: int) -> None:
    cases = pairs()
    if count == 1:
        with fresh():
            results = [audited(cases)]
    else:
        results = {2: two, 4: four}[count].run(audited, cases, timeout=360)
    for number, case in enumerate(cases):
        found = results[0][number][0]
        assert all(process[number][0] == found for process in results), case
        given = sorted(sample for process in results for sample in process[number][1])
        total, fills = expected(case, count)
        own_streams = case["data"] == "files" and not case["dispatch_batches"] and count > 1
        assert not found.twice, case
        assert len(given) == len(set(given)) == sum(found.per_process), case
        if not (own_streams and case["drop_last"]):
            assert sum(found.per_process) == total, case
        assert fills or own_streams or not found.added, case
        if not case["drop_last"]:
            assert given == list(range(case["length"])), case
            assert found.exact, case


def test_only_prepared_loaders_can_be_audited() -> None:
    with pytest.raises(UnknownKind, match="prepared loader"):
        audit(DataLoader(range(3)))


def test_an_audit_finds_what_is_wrong() -> None:
    with fresh():
        whole = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=1, process_index=0)
        found = audit(whole, whole)
        assert (found.twice, found.missing, found.exact) == ((0, 1, 2, 3, 4), (), False)
        half = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
        found = audit(half)
        assert (found.per_process, found.added, found.missing) == ((2,), 2, (0, 1, 4))
        stream = prepare_data_loader(DataLoader(Stream(7), batch_size=2), num_processes=2, process_index=1)
        assert audit(stream).missing == ("0:0", "0:1", "0:4", "0:5")
