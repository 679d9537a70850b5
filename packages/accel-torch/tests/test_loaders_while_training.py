"""Each kind of loader in a training loop: metrics, windows and what a process reads, at n and at 4n samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from accel_data import DataLoaderConfiguration
from accel_testing.processes import Processes
from accel_torch import Accelerator

SMALL, BATCH = 13, 2


class Samples(Dataset[int]):
    """Samples that are their index, and how many of them were read in this process."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.reads += 1
            yield index


class ShortLength(Stream):
    """A stream with more samples than it reports."""

    def __len__(self) -> int:
        return self.length - 3


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


class Buckets(BatchSampler):
    """Batches of two buckets, the last of each a short one; its length is one too large if it is an estimate."""

    def __init__(self, length: int, estimate: bool) -> None:
        self.length, self.estimate = length, estimate
        self.batch_size, self.drop_last = BATCH, False

    def __iter__(self) -> Iterator[list[int]]:
        middle = self.length // 4 * 2 + 1
        for first, stop in ((0, middle), (middle, self.length)):
            for start in range(first, stop, BATCH):
                yield list(range(start, min(start + BATCH, stop)))

    def __len__(self) -> int:
        return len(list(iter(self))) + self.estimate


class Repeat:
    """A batch sampler that never ends."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader[Any]):
    """Keeps its iterator over all epochs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr, arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (next(self.iterator) for _ in range(len(self)))


# By name: the loader of a length, and who reads what: "own" samples, "all" on each process, or "main" reads for all.
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "map": (lambda n: DataLoader(Samples(n), BATCH), {}, "own"),
    "shuffled": (lambda n: DataLoader(Samples(n), BATCH, shuffle=True), {}, "own"),
    "seeded": (lambda n: DataLoader(Samples(n), BATCH, shuffle=True), {"order": "seeded", "data_seed": 3}, "own"),
    "split": (lambda n: DataLoader(Samples(n), 6), {"split_batches": True}, "own"),
    "dispatched map": (lambda n: DataLoader(Samples(n), BATCH), {"dispatch_batches": True}, "main"),
    "stream": (lambda n: DataLoader(Stream(n), BATCH), {"dispatch_batches": False}, "all"),
    "dispatched stream": (lambda n: DataLoader(Stream(n), BATCH), {}, "main"),
    "sized stream": (lambda n: DataLoader(Sized(n), BATCH), {}, "main"),
    "stream of a wrong length": (lambda n: DataLoader(ShortLength(n), BATCH), {}, "main"),
    "buckets": (lambda n: DataLoader(Samples(n), batch_sampler=Buckets(n, False)), {}, "own"),
    "buckets of a wrong length": (lambda n: DataLoader(Samples(n), batch_sampler=Buckets(n, True)), {}, "own"),
    "kept iterator": (lambda n: Endless(Samples(n), BATCH, shuffle=True), {"order": "seeded", "data_seed": 3}, "own"),
}


def trained(backend: str, kind: str, length: int) -> dict[str, Any]:
    """Two epochs over a loader, with a validation loader that stays open, and another one inside the first window."""
    make, options, _ = KINDS[kind]
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(**options),
    )
    plain = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    unprepared = make(length)
    data, loader = unprepared.dataset, accelerator.prepare(unprepared)
    validation: Any = accelerator.prepare(DataLoader(Samples(14), 6))
    answer: dict[str, Any] = {"epochs": [], "validation": [], "syncs": [], "reads": [], "real": []}
    for _ in range(2):
        held = iter(validation)
        next(held)
        results, syncs, own = [], [], 0
        before = data.reads
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if not number:
                    inner = [accelerator.gather_for_metrics(each).tolist() for each in validation]
                    answer["validation"].append(sorted(chain.from_iterable(inner)))
                accelerator.backward(model(batch[:, None].float() / length).mean())
                syncs.append(accelerator.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()
            results += accelerator.gather_for_metrics(batch).tolist()
            own += len(batch)
        answer["epochs"].append(sorted(results))
        answer["syncs"].append(syncs)
        answer["reads"].append(data.reads - before)
        answer["real"].append(own)
    return answer


def trained_all(backend: str) -> dict[str, dict[str, Any]]:
    return {f"{kind} {length}": trained(backend, kind, length) for kind in KINDS for length in (SMALL, 4 * SMALL)}


@pytest.mark.filterwarnings("ignore:.*len\\(\\) reports")
@pytest.mark.parametrize(("count", "backend"), [(1, "single"), (2, "fsdp2"), (3, "ddp")])
def test_every_kind_of_loader(count: int, backend: str, processes: Callable[[int], Processes]) -> None:
    everyones = processes(count).run(trained_all, backend)
    for name in everyones[0]:
        kind, length = name.rpartition(" ")[0], int(name.rpartition(" ")[2])
        for rank, answer in enumerate(each[name] for each in everyones):
            assert answer["epochs"] == [list(range(length))] * 2, name
            assert answer["validation"] == [list(range(14))] * 2, name
            for syncs in answer["syncs"]:
                last = len(syncs) - 1
                assert syncs == [place % 2 == 1 or place == last for place in range(len(syncs))], name
            reader = "all" if count == 1 and KINDS[kind][2] == "main" else KINDS[kind][2]
            wanted = {"own": answer["real"], "all": [length] * 2, "main": [0 if rank else length] * 2}[reader]
            assert answer["reads"] == wanted, name
        assert len({str(each[name]["syncs"]) for each in everyones}) == 1, name
