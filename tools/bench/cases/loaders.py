"""Loaders: epochs of indices, first batches, what is added to each batch, DataLoader workers, and dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final

from bench.case import Call, Case, Scope, Side, Work

GROUP: Final = "loaders"
INDICES: Final = "Epochs: CPU time of one process for its indices of 1,000,000 samples in batches of 8."
FIRST: Final = (
    "First batches and skips: CPU time from the start of an epoch, or of the rest of one, to its first batch."
)
BATCHES: Final = 'One batch: what a prepared loader adds to a batch in memory; "raw" is the plain loader of the script.'
WORKERS: Final = "Workers: CPU time of all processes of the epoch, from their start to their end."
DISPATCHED: Final = (
    "Dispatched steps: CPU time for four tensors of (64, 128) for each process, the mean of all processes."
)

MIXTURES: Final = 'Mixtures: one sample of two shuffled sources; "raw" is the plain data set.'

SAMPLES, BATCH, STEPS, BATCHES_A_ROUND, MIXED = 1_000_000, 8, 100, 20_000, 32_000


def library(scope: Scope) -> Any:
    """The loaders; a run is begun, since the original cannot do without."""
    if scope.kind == "peer":
        scope.library("", "accelerate").Accelerator(cpu=True)
    else:
        scope.library("accel_state").PartialState(cpu=True)
    return scope.library("accel_data", "accelerate.data_loader")


def drain(batches: Iterable[Any]) -> None:
    """Read to the end."""
    for _ in batches:
        pass


def indices(kind: str, processes: int, scope: Scope) -> Any:
    """The first process's batches out of those of all."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    sampler: Any = (RandomSampler if kind == "shuffled" else SequentialSampler)(range(SAMPLES))
    size = BATCH * processes if kind == "split" else BATCH
    batches = BatchSampler(sampler, size, False)
    return library(scope).BatchSamplerShard(batches, processes, 0, split_batches=kind == "split")


def epoch(kind: str, processes: int, scope: Scope) -> Call:
    """One process's epoch of indices."""
    shard = indices(kind, processes, scope)
    return lambda: drain(shard)


def first_indices(scope: Scope) -> Call:
    """The first batch of indices of one of very many processes."""
    shard = indices("sequential", 4096, scope)
    return lambda: next(iter(shard))


def numbers(kind: str, length: int) -> Any:
    """A data set or stream whose samples cost next to nothing."""
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(length))

    return Stream() if kind == "stream" else range(length)


def skip(kind: str, scope: Scope) -> Call:
    """The first batch after nine tenths of 200,000 samples."""
    from torch.utils.data import DataLoader

    functions = library(scope)
    shuffle = True if kind == "shuffled" else None
    plain: Any = DataLoader(numbers(kind, 200_000), batch_size=BATCH, collate_fn=len, shuffle=shuffle)
    loader = functions.prepare_data_loader(plain)
    return lambda: next(iter(functions.skip_first_batches(loader, 22_500)))


def tensors(length: int, workers: int, scope: Scope) -> Any:
    """A prepared loader of samples of 16 numbers; a plain one where neither library is measured."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    plain = DataLoader(TensorDataset(torch.rand(length, 16)), batch_size=BATCH, num_workers=workers)
    return plain if scope.kind == "raw" else prepared(plain, scope)


def prepared(plain: Any, scope: Scope) -> Any:
    """The loader as a library prepares it."""
    import torch

    return library(scope).prepare_data_loader(plain, put_on_device=True, device=torch.device("cpu"))


def first_batch(scope: Scope) -> Call:
    """The first batch of an epoch, loaded in this process."""
    loader = tensors(100 * BATCH, 0, scope)
    return lambda: next(iter(loader))


def with_workers(scope: Scope) -> Call:
    """A short epoch, loaded in two DataLoader workers."""
    loader = tensors(100 * BATCH, 2, scope)
    return lambda: drain(loader)


def per_batch(leaves: int, scope: Scope) -> Call:
    """Many batches that are there already."""
    import torch
    from torch.utils.data import DataLoader

    tensor = torch.zeros(4)
    batch: Any = tensor if leaves == 1 else {str(index): torch.zeros(4) for index in range(leaves)}

    def ready(samples: list[int]) -> Any:
        return batch

    plain: Any = DataLoader(range(BATCHES_A_ROUND), batch_size=1, collate_fn=ready)  # type: ignore[arg-type]
    loader = plain if scope.kind == "raw" else prepared(plain, scope)
    return lambda: drain(loader)


def dispatch(scope: Scope) -> Call:
    """Steps whose data the first process reads and sends."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    batch = {str(index): torch.rand(64, 128) for index in range(4)}

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield batch

    plain = DataLoader(Stream(), batch_size=None)
    batches = iter(library(scope).prepare_data_loader(plain, put_on_device=True, dispatch_batches=True))
    return lambda: drain(islice(batches, STEPS))


def mixture(samples: int) -> Any:
    """Two shuffled sources of which samples cost next to nothing."""
    from accel_data import MixtureDataset

    sources = {"code": range(100_000), "text": range(100_000)}
    return MixtureDataset(sources, {"code": 0.7, "text": 0.3}, stop="repeat", num_samples=samples)


def mixed(scope: Scope) -> Call:
    """Many samples through a plain loader."""
    from torch.utils.data import DataLoader

    data: Any = range(MIXED) if scope.kind == "raw" else mixture(MIXED)
    loader: Any = DataLoader(data, batch_size=32, collate_fn=len)
    return lambda: drain(loader)


def far_sample(scope: Scope) -> Call:
    """A sample far in a mixture that is made for it."""
    return lambda: mixture(10**12)[10**9]


def case(name: str, unit: str, limit: float, side: Side, method: str, processes: int = 1, per: int = 1) -> Case:
    """A case of ours beside the original."""
    return Case(GROUP, name, unit, "ours/peer", limit, Work(side, side, processes=processes), method, per)


def added(name: str, limit: float, leaves: int) -> Case:
    """A case of what is added to each batch."""
    side = partial(per_batch, leaves)
    return Case(GROUP, name, "CPU us", "ours - raw", limit, Work(side, side, side), BATCHES, BATCHES_A_ROUND)


CASES: Final = (
    *(
        case(f"one epoch, {kind}, {processes} processes", "CPU ms", limit, partial(epoch, kind, processes), INDICES)
        for kind, limits in {
            "sequential": (0.2, 0.02, 0.005),
            "split": (0.4, 0.03, 0.01),
            "shuffled": (0.2, 0.08, 0.07),
        }.items()
        for processes, limit in zip((8, 256, 4096), limits, strict=True)
    ),
    case("first batch, 4096 processes", "CPU us", 0.005, first_indices, FIRST),
    case("skip 180,000, map", "CPU ms", 0.1, partial(skip, "map"), FIRST),
    case("skip 180,000, shuffled", "CPU ms", 0.25, partial(skip, "shuffled"), FIRST),
    case("skip 180,000, stream", "CPU ms", 0.4, partial(skip, "stream"), FIRST),
    case("first batch, without workers", "CPU us", 1.0, first_batch, FIRST),
    case("100 batches, 2 workers", "CPU ms", 1.0, with_workers, WORKERS),
    added("one batch, a tensor", 0.5, 1),
    added("one batch, a dict of 8", 1.2, 8),
    Case(GROUP, "one sample of a mixture", "CPU us", "ours - raw", 3.0, Work(mixed, None, mixed), MIXTURES, MIXED),
    Case(GROUP, "sample 10^9 of a mixture", "CPU ms", "ours", 50.0, Work(far_sample), MIXTURES),
    case("dispatched step, 2 processes", "CPU ms", 0.25, dispatch, DISPATCHED, 2, STEPS),
    case("dispatched step, 4 processes", "CPU ms", 0.25, dispatch, DISPATCHED, 4, STEPS),
)
