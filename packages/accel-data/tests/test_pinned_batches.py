"""Pinned memory and copies that do not block, on the simulated device."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from accel_data import prepare_data_loader
from accel_testing.simulated_device import NAME, POSSIBLE, simulated_device
from accel_testing.streams import Stream

pytestmark = pytest.mark.usefixtures("fresh_state")


simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device that is written in Python")

Pair = namedtuple("Pair", ["x", "y"])


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The device, and the addresses of what was pinned; it has no memory of its own to pin."""
    addresses: set[int] = set()
    kept = []

    def pin(tensor: torch.Tensor, *device: Any) -> torch.Tensor:
        copy = tensor.clone()
        # What is kept cannot give its address to another tensor.
        kept.append(copy)
        addresses.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with simulated_device():
        yield addresses


class Copies(TorchDispatchMode):
    """Notes each copy to the device: whether it blocks, and where it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[bool] = []
        self.sources: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and torch.device(device).type == NAME:
            self.blocking.append(not kwargs.get("non_blocking", False))
            self.sources.append(args[0].data_ptr())
        return func(*args, **kwargs)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return Pair(torch.full((2,), float(index)), {"deep": [torch.tensor(index)]})


PAIRS = [Pairs()[index] for index in range(7)]


def copied(loader: Any) -> tuple[Copies, list[list[float]]]:
    copies, values = Copies(), []
    batches = iter(loader)
    while True:
        with copies:
            batch = next(batches, None)
        if batch is None:
            return copies, values
        assert type(batch) is Pair
        assert batch.x.device.type == batch.y["deep"][0].device.type == NAME
        values.append(batch.x.cpu()[:, 0].tolist())


@simulated
@pytest.mark.parametrize("kind", ["indices", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_batches_are_pinned_and_copied_as_asked(pinned: set[int], kind: str, workers: int, non_blocking: bool) -> None:
    data: Any = Pairs() if kind == "indices" else Stream(PAIRS)
    plain = DataLoader(data, batch_size=2, num_workers=workers, pin_memory=True)
    loader: Any = prepare_data_loader(
        plain,
        device=torch.device(NAME, 0),
        num_processes=2,
        process_index=1,
        put_on_device=True,
        non_blocking=non_blocking,
    )
    copies, values = copied(loader)
    assert values == [[2, 3], [6, 0]]
    # The last batch is marked on its way from a DataLoader worker of a stream, and pinned all the same.
    assert loader.progress.padding.of(1) == 1
    assert copies.blocking == [not non_blocking] * 4
    assert set(copies.sources) <= pinned


@simulated
@pytest.mark.parametrize("non_blocking", [False, True])
def test_what_the_main_process_reads_for_all_is_pinned_and_copied_as_asked(
    pinned: set[int], non_blocking: bool
) -> None:
    plain = DataLoader(Pairs(), batch_size=2, pin_memory=True, drop_last=True)
    loader = prepare_data_loader(
        plain, device=torch.device(NAME, 0), put_on_device=True, non_blocking=non_blocking, dispatch_batches=True
    )
    copies, values = copied(loader)
    assert values == [[0, 1], [2, 3], [4, 5]]
    assert copies.blocking == [not non_blocking] * 6
    assert set(copies.sources) <= pinned


@simulated
def test_without_pinning_nothing_is_pinned(pinned: set[int]) -> None:
    loader = prepare_data_loader(DataLoader(Pairs(), batch_size=2), device=torch.device(NAME, 0), put_on_device=True)
    assert copied(loader)[0].blocking == [True] * 8
    assert not pinned
