"""Data sets of Hugging Face `datasets`, with indices and streaming, divided, dispatched, shuffled and continued."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import audit, prepare_data_loader, skip_first_batches
from accel_state import PartialState
from accel_testing.fresh import fresh
from accel_testing.processes import Processes

datasets = pytest.importorskip("datasets", reason="reads data sets of Hugging Face, an optional library")
pytest.importorskip("torchdata", reason="wraps the loader of torchdata, an optional library")

# As `conftest.py` does for torch.
multiprocessing.set_forkserver_preload(["torch", "datasets"])

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")


def data_set(kind: str, length: int = 22) -> Any:
    whole = datasets.Dataset.from_dict({"x": list(range(length)), "name": [str(index) for index in range(length)]})
    if kind == "indices":
        return whole.with_format("torch")
    shards = {"one file": 1, "files": 4, "shuffled files": 4}[kind]
    stream = whole.to_iterable_dataset(num_shards=shards)
    return (stream.shuffle(seed=3, buffer_size=4) if kind == "shuffled files" else stream).with_format("torch")


def prepared(kind: str, workers: int = 0, way: str = "position", **options: Any) -> Any:
    data = data_set(kind)
    how = {"shuffle": True} if kind == "indices" else {}
    ways = {"restore_position": way == "position", "use_stateful_dataloader": way == "stateful"}
    plain = DataLoader(data, batch_size=2, num_workers=workers, **how)
    return prepare_data_loader(plain, use_seedable_sampler=True, data_seed=1, put_on_device=True, **ways, **options)


def epoch_of(loader: Any) -> list[Any]:
    return [(batch["x"].tolist(), list(batch["name"])) for batch in loader]


def resumed(cases: list[tuple[str, int, str, dict[str, Any]]]) -> list[tuple[list[Any], list[Any]]]:
    PartialState(cpu=True)
    results = []
    for kind, workers, way, options in cases:
        loader = prepared(kind, workers, way, **options)
        epoch_of(loader)
        batches, states = [], []
        for batch in loader:
            batches.append((batch["x"].tolist(), list(batch["name"])))
            states.append(copy.deepcopy(loader.state_dict()))
        following = epoch_of(loader)
        for steps in (1, len(states) - 1):
            again = prepared(kind, workers, way, **options)
            again.load_state_dict(states[steps - 1])
            current = skip_first_batches(again, steps) if way == "by hand" else again
            results.append((batches[steps:] + following, epoch_of(current) + epoch_of(again)))
    return results


KINDS = ("indices", "one file", "files", "shuffled files")


@pytest.mark.parametrize("way", ["position", "by hand", "stateful"])
def test_hugging_face_loaders_resume_in_the_middle_of_an_epoch(two: Processes, way: str) -> None:
    cases: list[tuple[str, int, str, dict[str, Any]]] = [(kind, 0, way, {}) for kind in KINDS]
    cases += [("files", 1, way, {}), ("shuffled files", 1, way, {}), ("indices", 1, way, {})]
    cases += [("shuffled files", 0, way, {"dispatch_batches": True})]
    for results in two.run(resumed, cases):
        assert len(results) == 2 * len(cases)
        for (expected, after), case in zip(results, [case for case in cases for _ in range(2)], strict=True):
            assert after == expected, case


def audited(kinds: list[str]) -> list[tuple[bool, int, tuple[int, ...]]]:
    PartialState(cpu=True)
    results = []
    for kind in kinds:
        found = audit(prepared(kind))
        results.append((found.exact, found.added, found.per_process))
    return results


def test_hugging_face_loaders_give_every_sample_once(two: Processes) -> None:
    found = two.run(audited, list(KINDS))
    assert found[0] == found[1]
    assert all(exact and sum(per_process) == 22 for exact, _, per_process in found[0])


def test_a_stream_is_shuffled_anew_in_every_epoch() -> None:
    with fresh():
        loader = prepared("shuffled files")
        first, second = epoch_of(loader), epoch_of(loader)
        assert first != second
        assert sorted(x for batch, _ in first for x in batch) == sorted(x for batch, _ in second for x in batch)
        loader.set_epoch(0)
        assert epoch_of(loader) == first


def test_named_columns_arrive_as_tensors() -> None:
    with fresh():
        batch = next(iter(prepared("files")))
        assert torch.is_tensor(batch["x"])
        assert batch["name"] == ["0", "1"]
