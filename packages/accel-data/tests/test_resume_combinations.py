"""Continuing after every batch of an epoch: every pair of options on real processes, their product with played ones."""

from __future__ import annotations

import copy
import importlib.util
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from accel_data import prepare_data_loader, skip_first_batches
from accel_ops import gather_object
from accel_ops.rng import restore, snapshot
from accel_state import PartialState, current
from accel_state.transport.base import DONE, LocalTransport, Work
from accel_testing.fresh import fresh
from accel_testing.processes import Processes

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")

STATEFUL = ("stateful",) if importlib.util.find_spec("torchdata") else ()


class Samples(Dataset[torch.Tensor]):
    """Samples that are their index and, with `draws`, a random number."""

    def __init__(self, length: int, draws: bool) -> None:
        self.length = length
        self.draws = draws

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random() if self.draws else 0.0], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """The same samples in every run of an epoch, and others in every epoch."""

    epoch, begin, step = 0, 0, 1

    def __init__(self, length: int, draws: bool) -> None:
        self.samples = Samples(1000, draws)
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.samples[100 * self.epoch + index] for index in range(self.begin, self.length, self.step))


class Files(Stream):
    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Files:
        part = copy.copy(self)
        part.begin, part.step = index, num_shards
        return part


class CustomSampler(Sampler[int]):
    """A sampler with a generator of its own."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=self.generator).tolist())

    def __len__(self) -> int:
        return self.length


class Custom(BatchSampler):
    """A batch sampler that is not torch's."""


OPTIONS: dict[str, tuple[Any, ...]] = {
    "data": ("indices", "stream", "files"),
    "sampler": ("shuffled", "sequential", "generator", "custom sampler", "custom"),
    "length": (13, 8),
    "batch_size": (2, None),
    "drop_last": (False, True),
    "split_batches": (False, True),
    "even_batches": (True, False),
    "dispatch_batches": (False, True),
    "use_seedable_sampler": (False, True),
    "workers": (0, 1),
    "seed_samples": (False, True),
    "way": ("position", "by hand", *STATEFUL),
}


def possible(case: dict[str, Any]) -> bool:
    """Whether torch's loader, or `split_batches`, can do this, and the value of no option is without effect."""
    if case["batch_size"] is None and (case["drop_last"] or case["split_batches"] or case["sampler"] == "custom"):
        return False
    if case["use_seedable_sampler"] and case["sampler"] not in ("shuffled", "custom"):
        return False
    return case["data"] == "indices" or case["sampler"] == "sequential"


def prepared(case: dict[str, Any], **place: Any) -> Any:
    length, size = case["length"], case["batch_size"]
    size = size and size * (4 if case["split_batches"] else 1)
    data: Any = {"indices": Samples, "stream": Stream, "files": Files}[case["data"]](length, case["seed_samples"])
    how: dict[str, Any] = {"num_workers": case["workers"]}
    if case["sampler"] == "custom":
        how["batch_sampler"] = Custom(RandomSampler(range(length)), size, case["drop_last"])
    else:
        how |= {"batch_size": size, "drop_last": case["drop_last"]}
        how |= {"shuffle": True} if case["sampler"] in ("shuffled", "generator") else {}
        how |= {"generator": torch.Generator().manual_seed(5)} if case["sampler"] == "generator" else {}
        how |= {"sampler": CustomSampler(length)} if case["sampler"] == "custom sampler" else {}
    names = ("split_batches", "even_batches", "dispatch_batches", "use_seedable_sampler", "seed_samples")
    options = {name: case[name] for name in names} | place
    ways = {"restore_position": case["way"] == "position", "use_stateful_dataloader": case["way"] == "stateful"}
    return prepare_data_loader(DataLoader(data, **how), data_seed=3, put_on_device=True, **ways, **options)


def epoch_of(loader: Any) -> list[Any]:
    """The batches of an epoch and a random number drawn after each, as dropout would."""
    return [(batch.tolist(), float(torch.rand(()))) for batch in loader]


def host_generators() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist()


def check(case: dict[str, Any], **place: Any) -> int:
    """Continue after every batch of the second epoch; how many times that was."""
    random.seed(7)
    torch.manual_seed(7)
    loader = prepared(case, **place)
    epoch_of(loader)
    batches, states, generators = [], [], []
    for batch in loader:
        batches.append((batch.tolist(), float(torch.rand(()))))
        states.append(copy.deepcopy(loader.state_dict()))
        generators.append((snapshot(), host_generators()))
    following = epoch_of(loader)
    most = max(gather_object([len(states)]))
    for steps in (1, most) if case["workers"] and most else range(1, most + 1):
        random.seed(steps)
        torch.manual_seed(steps)
        again = prepared(case, **place)
        if steps > len(states):
            continue
        again.load_state_dict(states[steps - 1])
        kept, host = generators[steps - 1]
        restore(kept)
        rest = iter(skip_first_batches(again, steps) if case["way"] == "by hand" else again)
        first = next(rest, None)
        assert host_generators() == host, (case, steps)
        resumed = [] if first is None else [(first.tolist(), float(torch.rand(())))]
        resumed += [(batch.tolist(), float(torch.rand(()))) for batch in rest]
        assert resumed == batches[steps:], (case, steps)
        assert epoch_of(again) == following, (case, steps)
    return len(states)


def check_all(cases: list[dict[str, Any]]) -> int:
    PartialState(cpu=True)
    return sum(check(case) for case in cases)


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pair_of_options_on_real_processes(
    two: Processes, four: Processes, count: int, covering: Callable[..., list[dict[str, Any]]]
) -> None:
    cases = covering(OPTIONS, possible)
    if count == 1:
        with fresh():
            assert check_all(cases) > 5 * len(cases)
    else:
        group = {2: two, 4: four}[count]
        assert min(group.run(check_all, cases, timeout=240)) > len(cases)


class Played(LocalTransport):
    """The main process's way to others that are not there: it hears from all what it says itself."""

    def __init__(self, processes: int) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size = processes

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        output.view(self.world_size, -1).copy_(tensor.reshape(1, -1))
        return DONE


def check_played(case: dict[str, Any], processes: int) -> int:
    """`check` as the last process, or as the main process where that one reads for all."""
    if not case["dispatch_batches"]:
        return check(case, num_processes=processes, process_index=processes - 1)
    alone = current.process_or_start()
    transport = Played(processes) if processes > 1 else alone.transport
    with current.replace_process(alone._replace(transport=transport)):
        return check(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_product_of_all_options_with_played_processes() -> None:
    cases = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    alone = [case for case in cases if possible(case) and not case["workers"]]
    # A stream is divided by whoever plays the processes as one that cannot divide itself.
    alone = [case for case in alone if case["data"] != "files"]
    assert len(alone) > 1000
    resumed = 0
    with fresh():
        for number, case in enumerate(alone):
            processes = (1, 2, 4)[number % 3]
            each = case["length"] == 13 and case["way"] == "position" and not case["dispatch_batches"]
            for count in (1, 2, 4) if each else (processes,):
                resumed += check_played(case, count)
    assert resumed > 3000


def order_of(loaders: list[Any]) -> list[Any]:
    return [tuple(sample) for step in zip(*loaders, strict=True) for batch in step for sample in batch.tolist()]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", [False, True])
def test_another_number_of_processes_goes_on_with_the_remaining_samples(
    by_hand: bool, workers: int, split: bool
) -> None:
    case = {name: values[0] for name, values in OPTIONS.items()} | {
        "length": 48,
        "use_seedable_sampler": True,
        "workers": workers,
        "split_batches": split,
        "seed_samples": True,
        "way": "by hand" if by_hand else "position",
    }

    def make(processes: int) -> list[Any]:
        loaders = [prepared(case, num_processes=processes, process_index=index) for index in range(processes)]
        for loader in loaders:
            loader.set_epoch(1)
        return loaders

    with fresh():
        whole = order_of(make(1))
        first = make(4)
        running = [iter(loader) for loader in first]
        gone = [tuple(sample) for _ in range(3) for part in running for sample in next(part).tolist()]
        saved = first[0].state_dict()
        assert gone == whole[:24]
        for processes in (1, 2) if workers else (1, 2, 3, 8):
            # Three cannot share batches of eight, and eight have no whole number of steps behind them.
            if (split and processes == 3) or (by_hand and not split and processes == 8):
                continue
            later = make(processes)
            for loader in later:
                loader.load_state_dict(saved)
            done = 24 // (8 if split else 2 * processes)
            current = [skip_first_batches(loader, done) for loader in later] if by_hand else later
            assert (gone + order_of(current))[:48] == whole


def on_four() -> dict[str, Any]:
    PartialState(cpu=True)
    loader = prepared(CHANGING)
    for _ in loader:
        break
    state: dict[str, Any] = loader.state_dict()
    return state


def on_two(state: dict[str, Any]) -> list[list[float]]:
    PartialState(cpu=True)
    loader = prepared(CHANGING)
    loader.load_state_dict(state)
    return [batch[:, 0].tolist() for batch in loader]


CHANGING = {name: values[0] for name, values in OPTIONS.items()} | {"length": 24, "use_seedable_sampler": True}


def test_four_real_processes_are_followed_by_two(two: Processes, four: Processes) -> None:
    states = four.run(on_four)
    assert states[1:] == states[:-1]
    first, second = two.run(on_two, states[0])
    rest = [sample for mine, theirs in zip(first, second, strict=True) for sample in mine + theirs]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist()
    assert rest == order[8:]
