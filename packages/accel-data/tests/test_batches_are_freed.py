"""No batch outlives its step until the garbage collector runs.

The memory of a GPU would be missed, and a forked DataLoader worker that collects a pinned batch of its parent dies.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import prepare_data_loader
from accel_data.hooks import accompanied
from accel_state.errors import DataError
from accel_testing.processes import Processes

SAMPLES = 11
KINDS = ("map", "stream")


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((4,), float(index)), "deep": [torch.tensor(index)]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Rows()[index] for index in range(SAMPLES))


def alive_after_two_epochs(kind: str, dispatch: bool, workers: int, drop_last: bool = False) -> int:
    """How many tensors of two epochs are left, without the garbage collector."""
    data: Any = Rows() if kind == "map" else Stream()
    plain = DataLoader(data, batch_size=2, num_workers=workers, drop_last=drop_last)
    loader: Any = prepare_data_loader(plain, put_on_device=True, dispatch_batches=dispatch)
    references = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            for batch in loader:
                references += [weakref.ref(batch["x"]), weakref.ref(batch["deep"][0])]
            del batch
        return sum(reference() is not None for reference in references)
    finally:
        gc.enable()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("fresh_state")
def test_no_batch_of_one_process_is_left(kind: str, dispatch: bool, workers: int, drop_last: bool) -> None:
    assert alive_after_two_epochs(kind, dispatch, workers, drop_last) == 0


class Failing(Rows):
    """Fails at its last sample."""

    def __getitem__(self, index: int) -> Any:
        if index == SAMPLES - 1:
            raise ValueError("corrupt record")
        return super().__getitem__(index)


def alive_after_an_error(dispatch: bool) -> tuple[int, int]:
    """The batches before an error of reading, and how many of their tensors are left when it was handled."""
    loader: Any = prepare_data_loader(
        DataLoader(Failing(), batch_size=2), put_on_device=True, dispatch_batches=dispatch
    )
    references = []
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((ValueError, DataError)):
            references.extend(weakref.ref(batch["x"]) for batch in loader)
        return len(references), sum(reference() is not None for reference in references)
    finally:
        gc.enable()


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.usefixtures("fresh_state")
def test_the_loop_gets_the_batches_before_an_error_and_none_is_left(dispatch: bool) -> None:
    assert alive_after_an_error(dispatch) == (SAMPLES // 2, 0)


class KnownIterator(DataLoader[Any]):
    """Keeps a weak reference to torch's iterator."""

    iterator: Any = None

    def __iter__(self) -> Any:
        batches = super().__iter__()
        KnownIterator.iterator = weakref.ref(batches)
        return batches


def read_without_worker(loader: Any) -> None:
    """Read a loader whose only worker is killed after the first batch."""
    for _ in loader:
        (worker,) = KnownIterator.iterator()._workers
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def alive_after_a_worker_died() -> bool:
    """Whether torch's iterator is left when the error of a worker was handled that died between two reads."""
    loader: Any = prepare_data_loader(KnownIterator(Rows(), batch_size=2, num_workers=1), put_on_device=True)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(DataError, match="A DataLoader worker died"):
            read_without_worker(loader)
        return KnownIterator.iterator() is not None
    finally:
        gc.enable()


@pytest.mark.usefixtures("fresh_state")
def test_the_iterator_of_a_worker_that_died_is_not_left() -> None:
    # A forked worker that collects an iterator of its parent prints an error of torch.
    assert not alive_after_a_worker_died()


def test_a_batch_is_free_before_the_next_is_read() -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(3):
            assert [reference() for reference in references] == [None] * len(references)
            batch = torch.zeros(4)
            references.append(weakref.ref(batch))
            yield batch
            del batch

    for batch in accompanied(batches(), lambda first: None, None):
        assert batch is references[-1]()
        del batch
    assert len(references) == 3


def all_kinds() -> dict[str, int]:
    return {
        f"{kind}, dispatch_batches={dispatch}": alive_after_two_epochs(kind, dispatch, 0)
        for kind, dispatch in product(KINDS, [False, True])
    }


def test_no_batch_of_two_processes_is_left() -> None:
    with Processes(2, timeout=250) as group:
        for alive in group.run(all_kinds):
            assert set(alive.values()) == {0}, alive
