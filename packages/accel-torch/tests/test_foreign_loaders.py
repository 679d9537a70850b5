"""Loaders of other libraries, which register with `GradientState` or subclass `DataLoaderStateMixin`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import DataLoaderStateMixin
from accel_state import GradientState
from accel_testing.processes import Processes
from accel_torch import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_state")


class Registered:
    """Registers itself while it is iterated, with the names of the original; its last batch has three real samples."""

    def __init__(self, batches: list[torch.Tensor], remainder: int) -> None:
        self.batches, self.end_of_dataloader, self.remainder = batches, False, remainder

    def __iter__(self) -> Iterator[torch.Tensor]:
        gradient = GradientState()
        gradient._add_dataloader(self)
        try:
            for number, batch in enumerate(self.batches, 1):
                self.end_of_dataloader = number == len(self.batches)
                yield batch
        finally:
            gradient._remove_dataloader(self)


class Mixed(DataLoader[Any], DataLoaderStateMixin):
    """A loader that computes its remainder from its lengths, as loaders of the original do."""

    def __init__(self, data: Any, batch_size: int) -> None:
        super().__init__(data, batch_size=batch_size)
        self.gradient_state = GradientState()
        self._drop_last = False

    @property
    def total_batch_size(self) -> int:
        assert self.batch_size is not None
        return self.batch_size

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        for number, batch in enumerate(super().__iter__(), 1):
            self.end_of_dataloader = number == len(self)
            yield batch
        self.end()


def accumulated(accelerator: Accelerator, loader: Any) -> tuple[list[bool], list[Any], list[Any]]:
    """Whether each micro-batch synchronises gradients, the gathered tensors, and the gathered objects."""
    model = torch.nn.Linear(1, 1)
    synchronises, tensors, objects = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            synchronises.append(accelerator.sync_gradients)
        tensors.append(accelerator.gather_for_metrics({"x": batch})["x"].tolist())
        objects.append(accelerator.gather_for_metrics([str(int(sample)) for sample in batch]))
    assert not GradientState().in_dataloader
    return synchronises, tensors, objects


def test_a_registered_loader_works_in_accumulate_and_metrics() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = Registered([torch.arange(4), torch.arange(4, 8), torch.tensor([8, 9, 10, 0])], remainder=3)
    synchronises, tensors, objects = accumulated(accelerator, loader)
    assert synchronises == [False, True, True]
    assert tensors == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert objects == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9", "10"]]


def test_a_subclass_of_the_mixin_works_in_accumulate_and_metrics() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = Mixed(torch.arange(10), 4)
    synchronises, tensors, _ = accumulated(accelerator, loader)
    assert synchronises == [False, True, True]
    assert tensors == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (loader.end_of_dataloader, loader.remainder) == (True, 2)
    loader.reset()
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)


def padded_by_itself() -> list[int]:
    """Each process has two rows of a step of four; the last step has three real ones."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    loader = Registered([torch.tensor([2 * rank, 2 * rank + 1]), torch.tensor([[4, 5], [6, 0]][rank])], remainder=3)
    return [sample for batch in loader for sample in accelerator.gather_for_metrics(batch).tolist()]


def test_the_remainder_counts_the_samples_of_all_processes(two: Processes) -> None:
    assert two.run(padded_by_itself) == [list(range(7))] * 2
