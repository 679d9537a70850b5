"""Every pair of options on real processes, and the product of those that divide the data on played ones, sample by
sample against what the script's own loader gives in one process."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterator
from itertools import product, zip_longest
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from accel_data import Audit, audit, prepare_data_loader
from accel_data.batches import cut
from accel_state import GradientState, PartialState, current
from accel_state.settings.installed import importable
from accel_state.transport.base import LocalTransport
from accel_testing.fresh import fresh
from accel_testing.processes import Processes

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")

Pair = namedtuple("Pair", ["pixels", "label"])
Case = dict[str, Any]
Steps = list[tuple[int, list[tuple[Any, ...]]]]
"""By step, how many samples a process was given, and those of them that are real."""

DATA_SEED, SEED = 3, 7


def sample(kind: str, index: int) -> Any:
    value = torch.tensor(float(index))
    return {
        "tensor": value,
        "nested": {"x": value, "deep": [value, {"y": value}]},
        "named": Pair(value, index),
        "text": {"name": str(index), "x": value},
    }[kind]


def columns(kind: str, batch: Any) -> list[Any]:
    """What a batch has for each sample, where the nesting says that it is."""
    if kind == "tensor":
        return [batch]
    if kind == "nested":
        return [batch["x"], batch["deep"][0], batch["deep"][1]["y"]]
    if kind == "named":
        assert type(batch) is Pair
        return [batch.pixels, batch.label]
    return [batch["name"], batch["x"]]


def samples_of(kind: str, batch: Any, single: bool) -> list[tuple[Any, ...]]:
    values = [part.tolist() if isinstance(part, torch.Tensor) else part for part in columns(kind, batch)]
    return [tuple(values)] if single else list(zip(*values, strict=True))


def collate_text(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": [item["name"] for item in samples], "x": torch.stack([item["x"] for item in samples])}


def sliced(batch: Any, piece: slice, *, process_index: int, num_processes: int) -> Any:
    assert piece.start // (piece.stop - piece.start) == process_index < num_processes
    return cut(batch, piece.start, piece.stop)


class Samples(Dataset[Any]):
    def __init__(self, kind: str, length: int) -> None:
        self.kind = kind
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return sample(self.kind, index)


class Stream(IterableDataset[Any]):
    """Samples from a first one on, in steps."""

    def __init__(self, kind: str, length: int) -> None:
        self.kind = kind
        self.length = length
        self.first, self.step = 0, 1

    def set_epoch(self, epoch: int) -> None:
        """The same in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(self.kind, index) for index in range(self.first, self.length, self.step))


class Files(Stream):
    """A stream that can divide itself."""

    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Files:
        part = copy.copy(self)
        part.first, part.step = index, num_shards
        return part


class CustomSampler(Sampler[int]):
    """A sampler of somebody else's."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=self.generator).tolist())

    def __len__(self) -> int:
        return self.length


class Custom(BatchSampler):
    """A batch sampler that is not torch's."""


DATA = {"indices": Samples, "stream": Stream, "files": Files}
SHARDINGS = {"function": lambda data, count, index: data.shard(count, index)}
SLICES = {"own": sliced}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "data": ("indices", "stream", "files"),
    "sampler": ("sequential", "shuffled", "generator", "custom sampler", "custom"),
    "kind": ("tensor", "nested", "named", "text"),
    "length": (13, 16, 5),
    "batch_size": (4, None),
    "drop_last": (False, True),
    "workers": (0, 1, "persistent"),
    "split_batches": (False, True),
    "even_batches": (True, False),
    "dispatch_batches": (None, True, False),
    "use_seedable_sampler": (False, True),
    "use_configured_sampler": (False, True),
    "non_blocking": (False, True),
    "use_stateful_dataloader": (False, True) if importable("torchdata") else (False,),
    "sharding": ("auto", "dispatch", "already", "function"),
    "restore_position": (False, True),
    "seed_samples": (False, True),
    "put_on_device": (True, False),
    "rng_types": (None, ("generator",), ("torch", "generator")),
    "slice_fn_for_dispatch": (None, "own"),
}

PREPARED = (
    "split_batches",
    "even_batches",
    "dispatch_batches",
    "use_seedable_sampler",
    "use_configured_sampler",
    "non_blocking",
    "use_stateful_dataloader",
    "restore_position",
    "seed_samples",
    "put_on_device",
    "rng_types",
)


DIVIDING = (
    "data",
    "sampler",
    "length",
    "batch_size",
    "drop_last",
    "split_batches",
    "even_batches",
    "dispatch_batches",
    "use_seedable_sampler",
    "sharding",
    "restore_position",
)
"""The options that decide which process gets which sample."""


def possible(case: Case) -> bool:
    """Whether these do not contradict each other, by torch's rules and by ours."""
    single, stream = case["batch_size"] is None, case["data"] != "indices"
    if single and (case["drop_last"] or case["split_batches"] or case["sampler"] == "custom"):
        return False
    if stream and case["sampler"] != "sequential":
        return False
    if case["sharding"] in ("already", "function") and case["data"] != "files":
        return False
    dispatches = case["dispatch_batches"]
    return dispatches is None or case["sharding"] == "auto" or dispatches == (case["sharding"] == "dispatch")


def plain_loader(case: Case, generator: torch.Generator | None = None) -> DataLoader[Any]:
    """The script's loader; `generator` shuffles in place of what the case says."""
    data: Any = DATA[case["data"]](case["kind"], case["length"])
    workers = case["workers"]
    how: dict[str, Any] = {"num_workers": int(workers != 0), "persistent_workers": workers == "persistent"}
    if case["kind"] == "text" and case["batch_size"] is not None:
        how["collate_fn"] = collate_text
    if case["sampler"] == "custom":
        shuffled = RandomSampler(range(case["length"]), generator=generator)
        return DataLoader(data, batch_sampler=Custom(shuffled, case["batch_size"], case["drop_last"]), **how)
    how |= {"batch_size": case["batch_size"], "drop_last": case["drop_last"]}
    if case["sampler"] == "generator":
        generator = torch.Generator().manual_seed(5) if generator is None else generator
    if case["sampler"] in ("shuffled", "generator"):
        how["sampler"] = RandomSampler(range(case["length"]), generator=generator)
    elif case["sampler"] == "custom sampler":
        how["sampler"] = CustomSampler(case["length"])
    return DataLoader(data, **how)


def prepared(case: Case, processes: int, index: int, **place: int) -> Any:
    """The loader of one process; `place` where it is a played one."""
    plain = plain_loader(case)
    if case["sharding"] == "already":
        plain = DataLoader(
            plain.dataset.shard(processes, index),  # type: ignore[attr-defined]
            batch_size=plain.batch_size,
            drop_last=plain.drop_last,
            num_workers=plain.num_workers,
            persistent_workers=plain.persistent_workers,
            collate_fn=plain.collate_fn,
        )
    return prepare_data_loader(
        plain,
        data_seed=DATA_SEED,
        sharding=SHARDINGS.get(case["sharding"], case["sharding"]),
        slice_fn_for_dispatch=SLICES.get(case["slice_fn_for_dispatch"]),
        **{name: case[name] for name in PREPARED},
        **place,
    )


def divided_at_source(case: Case, processes: int) -> bool:
    if case["sharding"] in ("already", "function"):
        return processes > 1 or case["sharding"] == "function"
    whole = case["dispatch_batches"] or case["sharding"] == "dispatch"
    return case["data"] == "files" and not whole and processes > 1


def dispatched(case: Case, processes: int) -> bool:
    if case["dispatch_batches"] or case["sharding"] == "dispatch":
        return True
    undecided = case["dispatch_batches"] is None and case["sharding"] == "auto" and case["put_on_device"]
    return undecided and case["data"] == "stream" and processes > 1


def in_one_process(case: Case, processes: int) -> list[tuple[Any, ...]]:
    """The samples of an epoch in the order in which the script's own loader gives them to one process."""
    case = case | {"workers": 0}
    torch.manual_seed(SEED)
    generator = None
    seedable = case["use_seedable_sampler"] and not case["use_configured_sampler"]
    if seedable and case["sampler"] in ("shuffled", "generator", "custom"):
        generator = torch.Generator().manual_seed(DATA_SEED)
    divided = processes > 1 and not dispatched(case, processes)
    if generator is None and case["sampler"] in ("shuffled", "custom") and (divided or case["restore_position"]):
        # The seed that all processes agree on is the first thing that the main process draws.
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    single = case["batch_size"] is None
    loader = plain_loader(case | {"drop_last": False}, generator)
    return [item for batch in loader for item in samples_of(case["kind"], batch, single)]


def read(case: Case, loader: Any, index: int) -> Steps:
    """What one process is given in an epoch."""
    given, single = [], case["batch_size"] is None
    for batch in loader:
        padding = loader.progress.padding
        found = samples_of(case["kind"], batch, single)
        given.append((len(found), found if padding is None else found[: padding.of(index)]))
    assert loader.end_of_dataloader or not given
    assert not GradientState().in_dataloader
    return given


def check_audit(case: Case, found: Audit, given: list[Steps]) -> None:
    """Compare what an audit said with what all processes read."""
    assert found.per_process == tuple(sum(len(real) for _, real in steps) for steps in given), case
    assert found.added == sum(size - len(real) for steps in given for size, real in steps), case
    assert not found.twice, case
    assert found.exact or case["drop_last"], case


def check(case: Case, given: list[Steps], expected: list[tuple[Any, ...]]) -> None:
    """Compare what all processes read with what one would have read.

    Args:
        case: the options.
        given: by process, what `read` found.
        expected: the samples of the epoch, in order.
    """
    processes = len(given)
    if case["even_batches"] or dispatched(case, processes):
        assert len({tuple(size for size, _ in steps) for steps in given}) == 1, case
    if divided_at_source(case, processes):
        for index, steps in enumerate(given):
            own = [item for _, real in steps for item in real]
            mine = expected[index::processes]
            assert own == (mine[: len(own)] if case["drop_last"] else mine), case
        return
    order = [item for step in zip_longest(*given) for part in step if part is not None for item in part[1]]
    width = case["batch_size"] or 1
    step = width if case["split_batches"] else width * processes
    dropped = len(expected) % step if case["drop_last"] else 0
    assert order == expected[: len(expected) - dropped], case


def read_all(cases: list[Case]) -> list[Any]:
    state = PartialState(cpu=True)
    results = []
    for case in cases:
        torch.manual_seed(SEED if state.is_main_process else 100 + state.process_index)
        loader = prepared(case, state.num_processes, state.process_index)
        before = torch.get_rng_state()
        found = audit(loader)
        assert torch.equal(torch.get_rng_state(), before), case
        results.append((found, read(case, loader, state.process_index)))
    return results


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pair_of_options_on_real_processes(
    two: Processes, four: Processes, count: int, covering: Callable[..., list[Case]]
) -> None:
    cases = covering(OPTIONS, possible)
    if count == 1:
        with fresh():
            results = [read_all(cases)]
    else:
        results = {2: two, 4: four}[count].run(read_all, cases, timeout=240)
    for case, *found in zip(cases, *results, strict=True):
        audits = [one for one, _ in found]
        given = [steps for _, steps in found]
        assert audits.count(audits[0]) == len(audits), case
        check_audit(case, audits[0], given)
        check(case, given, in_one_process(case, count))


class Played(LocalTransport):
    """How the main process of a run that is played by one reaches the others, which is not needed to read for them."""

    def __init__(self, processes: int) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size = processes


def read_for_all(case: Case, processes: int) -> list[Steps]:
    """What `read` would find on every process, out of the steps that the main process puts together."""
    mine = current.process_or_start()
    with current.replace_process(mine._replace(transport=Played(processes))):
        loader = prepared(case, processes, 0)
    given: list[Steps] = [[] for _ in range(processes)]
    for step in loader.source.global_steps():
        for index, part in enumerate(step.batches):
            found = samples_of(case["kind"], part, case["batch_size"] is None)
            given[index].append((len(found), found if step.padding is None else found[: step.padding.of(index)]))
    return given


def read_each(case: Case, processes: int) -> list[Steps]:
    """What `read` finds on every process; an audit of all of them has to find the same."""
    loaders = []
    for index in range(processes):
        torch.manual_seed(SEED)
        loaders.append(prepared(case, processes, index, num_processes=processes, process_index=index))
    audited = audit(*loaders)
    given = [read(case, loader, index) for index, loader in enumerate(loaders)]
    check_audit(case, audited, given)
    return given


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_product_of_the_options_that_divide_the_data_on_played_processes() -> None:
    dividing = {name: values for name, values in OPTIONS.items() if name in DIVIDING}
    others = {name: values for name, values in OPTIONS.items() if name not in DIVIDING and name != "workers"}
    cases = [dict(zip(dividing, values, strict=True)) for values in product(*dividing.values())]
    seen = 0
    with fresh():
        for number, some in enumerate(cases):
            # What does not divide the data takes turns.
            turns = {
                name: values[number // place % len(values)] for place, (name, values) in enumerate(others.items(), 1)
            }
            case = {"workers": 0} | some | turns
            if not possible(case):
                continue
            for processes in (1, 2, 4):
                # Processes with streams of their own agree on every step, which takes real ones.
                if divided_at_source(case, processes):
                    continue
                torch.manual_seed(SEED)
                played = dispatched(case, processes) and processes > 1
                given = read_for_all(case, processes) if played else read_each(case, processes)
                check(case, given, in_one_process(case, processes))
                seen += 1
    assert seen > 3000
