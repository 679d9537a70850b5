"""Metrics over streams without length: every sample once, in any nesting of what is gathered."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration

Output = namedtuple("Output", ["logits", "parts"])


class Stream(IterableDataset[Any]):
    """Texts and numbers; nobody knows how many."""

    def __init__(self, begin: int, end: int) -> None:
        self.range = range(begin, end)

    def __iter__(self) -> Iterator[Any]:
        return ({"x": torch.tensor(float(index)), "name": f"sample {index}"} for index in self.range)


class Files(Stream):
    """The same in two files of different lengths, of which each process can have its own."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> Files:
        middle = self.range.start + 3
        return Files(*((self.range.start, middle) if index == 0 else (middle, self.range.stop)))


def evaluated(cases: list[tuple[str, int, Any, int, int]]) -> list[tuple[list[float], list[float], list[str]]]:
    results = []
    for kind, length, batch_size, workers, steps in cases:
        own = {"dispatched": True, "each reads all": False, "files": None}[kind]
        split = kind == "each reads all" and batch_size == 4
        configuration = DataLoaderConfiguration(dispatch_batches=own, split_batches=split)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration, gradient_accumulation_steps=steps)
        data = Files(0, length) if kind == "files" else Stream(0, length)
        loader = accelerator.prepare(DataLoader(data, batch_size=batch_size, num_workers=workers))
        logits: list[float] = []
        deep: list[float] = []
        names: list[str] = []
        for batch in loader:
            rows = batch["x"].reshape(-1, 1)
            output = Output(rows, {"deep": [rows[:, 0] + 0.5, {"twice": torch.cat([rows, rows], 1)}]})
            gathered = accelerator.gather_for_metrics(output)
            assert type(gathered) is Output
            assert torch.equal(gathered.parts["deep"][1]["twice"][:, 1:], gathered.logits)
            logits += gathered.logits[:, 0].tolist()
            deep += gathered.parts["deep"][0].tolist()
            texts = batch["name"] if batch_size else [batch["name"]]
            names += accelerator.gather_for_metrics(texts, use_gather_object=True)
        results.append((logits, deep, names))
    return results


def test_gather_for_metrics_over_streams_gives_every_sample_once(two: Processes) -> None:
    kinds = ("dispatched", "each reads all", "files")
    cases = [(*case, 0, 1) for case in product(kinds, (5, 8, 13), (4, 2))]
    cases += [(kind, 13, 4, 1, 2) for kind in kinds]
    cases += [(kind, 7, None, 0, 1) for kind in kinds]
    for results in two.run(evaluated, cases):
        for (kind, length, batch_size, *_), (logits, deep, names) in zip(cases, results, strict=True):
            case = (kind, length, batch_size)
            assert sorted(logits) == list(range(length)), case
            assert [value - 0.5 for value in deep] == logits, case
            assert names == [f"sample {int(value)}" for value in logits], case
