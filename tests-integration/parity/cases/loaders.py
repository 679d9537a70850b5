"""Which samples each process gets, in which batches, and what is known of them on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def _given(loader: Any, epochs: int = 1) -> Any:
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


def _prepared(data: Any, batch_size: int = 4, drop_last: bool = False, shuffle: bool = False, **options: Any) -> Any:
    set_seed(3)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    plain: Any = DataLoader(data, batch_size=batch_size, drop_last=drop_last, shuffle=shuffle)
    return accelerator.prepare(plain)


def evenly() -> Any:
    return _given(_prepared(range(21)))


def unevenly() -> Any:
    return _given(_prepared(range(21), even_batches=False))


def without_the_rest() -> Any:
    return _given(_prepared(range(21), drop_last=True))


def cut_in_parts() -> Any:
    return _given(_prepared(range(21), split_batches=True))


def cut_in_parts_without_the_rest() -> Any:
    return _given(_prepared(range(21), drop_last=True, split_batches=True))


def less_than_a_batch() -> Any:
    return _given(_prepared(range(3)))


def a_single_sample() -> Any:
    return _given(_prepared(range(1)))


def read_by_one_process() -> Any:
    return _given(_prepared(range(21), dispatch_batches=True))


def read_by_one_process_and_cut() -> Any:
    return _given(_prepared(range(21), dispatch_batches=True, split_batches=True))


def of_a_stream() -> Any:
    return _given(_prepared(Stream(21), dispatch_batches=False))


def of_a_stream_cut_in_parts() -> Any:
    return _given(_prepared(Stream(21), dispatch_batches=False, split_batches=True))


def of_a_stream_read_by_one_process() -> Any:
    return _given(_prepared(Stream(21), dispatch_batches=True))


def of_a_stream_by_default() -> Any:
    return _given(_prepared(Stream(21)))


def shuffled_by_seed_and_epoch() -> Any:
    return _given(_prepared(range(12), shuffle=True, use_seedable_sampler=True, data_seed=7), epochs=2)


def shuffled_by_the_seed_of_the_run() -> Any:
    return _given(_prepared(range(12), shuffle=True, use_seedable_sampler=True), epochs=2)


def an_epoch_by_number() -> Any:
    loader = _prepared(range(12), shuffle=True, use_seedable_sampler=True, data_seed=7)
    loader.set_epoch(5)
    return _given(loader)


def lengths() -> Any:
    loaders = [_prepared(range(21)), _prepared(range(21), split_batches=True), _prepared(range(21), drop_last=True)]
    return [[len(loader), loader.total_batch_size, loader.total_dataset_length] for loader in loaders]


def skipped() -> Any:
    return _given(skip_first_batches(_prepared(range(21)), 2), epochs=2)


def skipped_in_a_plain_loader() -> Any:
    return _given(skip_first_batches(DataLoader(range(9), batch_size=2), 1))  # type: ignore[arg-type]


def skipped_in_a_stream() -> Any:
    return _given(skip_first_batches(_prepared(Stream(21), dispatch_batches=False), 1))


def ends() -> Any:
    loader = _prepared(range(21))
    return [[loader.end_of_dataloader, loader.remainder] for _ in loader]


def who_is_in_iteration() -> Any:
    accelerator = Accelerator(cpu=True)
    plain = [DataLoader(range(9), batch_size=4) for _ in range(2)]  # type: ignore[arg-type]
    outer, inner = accelerator.prepare(*plain)
    state = accelerator.gradient_state
    seen = [state.in_dataloader]
    for _ in outer:
        seen.append(state.active_dataloader is outer)
        seen += [state.active_dataloader is inner for _ in inner]
        seen.append(state.active_dataloader is outer)
    return [*seen, state.in_dataloader]


def metrics_of_all_samples_once() -> Any:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(range(21), batch_size=4))  # type: ignore[arg-type]
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def metrics_when_one_process_reads() -> Any:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader: Any = accelerator.prepare(DataLoader(range(21), batch_size=4))  # type: ignore[arg-type]
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def metrics_in_a_dict() -> Any:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader([{"a": i, "b": float(i)} for i in range(9)], batch_size=2))  # type: ignore[arg-type]
    seen = []
    for batch in loader:
        gathered = accelerator.gather_for_metrics({"first": batch["a"], "second": (batch["b"],)})
        seen.append([gathered["first"].tolist(), gathered["second"][0].tolist()])
    return seen


def metrics_that_are_objects() -> Any:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(range(10), batch_size=2))  # type: ignore[arg-type]
    return [accelerator.gather_for_metrics([str(i) for i in batch.tolist()]) for batch in loader]


def nested_batches() -> Any:
    accelerator = Accelerator(cpu=True)
    data = [{"x": torch.tensor([i, i]), "name": str(i)} for i in range(4)]
    loader: Any = accelerator.prepare(DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    return [[batch["x"].tolist(), batch["name"]] for batch in loader]


def batches_by_a_sampler_of_ones_own() -> Any:
    accelerator = Accelerator(cpu=True)
    batches = [[0, 1], [2], [3, 4, 5], [6, 7]]
    loader: Any = accelerator.prepare(DataLoader(range(8), batch_sampler=batches))  # type: ignore[arg-type]
    return [[batch.tolist() for batch in loader], len(loader)]


def a_loader_is_a_loader() -> Any:
    loader = _prepared(range(8))
    return [isinstance(loader, DataLoader), type(loader).__name__, len(loader.dataset), loader.num_workers]


def prepared_twice() -> Any:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    return [accelerator.prepare(loader) is loader, _given(loader)]


def a_batch_that_cannot_be_cut() -> Any:
    return _given(_prepared(range(9), batch_size=3, split_batches=True))


def lists_are_no_loaders() -> Any:
    return Accelerator(cpu=True).skip_first_batches([1, 2], 1)
