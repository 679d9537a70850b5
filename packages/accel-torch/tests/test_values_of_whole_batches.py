"""gather_for_metrics of one value for the batch of each process: none comes from a batch that is only padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accel_testing.processes import Processes
from accel_torch import Accelerator

BATCH = 4


def last_step(length: int) -> dict[str, Any]:
    """What is left of the last step, in which some processes have only padding."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    result: dict[str, Any] = {}
    for batch in accelerator.prepare(DataLoader(torch.arange(length), batch_size=BATCH)):
        tensors = {
            "scalar": torch.tensor(rank),
            "element": torch.tensor([rank]),
            "row": torch.full((1, 2), rank),
            "samples": batch,
            "twice": batch.repeat_interleave(2),
        }
        gathered = accelerator.gather_for_metrics(tensors)
        result = {name: tensor.tolist() for name, tensor in gathered.items()}
        result["object"] = accelerator.gather_for_metrics([f"rank {rank}"])
        result["objects"] = accelerator.gather_for_metrics([f"sample {number}" for number in batch.tolist()])
        result["uneven"] = accelerator.gather_for_metrics([0] * (rank + BATCH + 1))
        result["pickled"] = accelerator.gather_for_metrics([torch.tensor(rank)], use_gather_object=True)
    return result


def check(group: Processes, count: int) -> None:
    for length in {1, BATCH, BATCH + 1, BATCH * (count - 1), BATCH * count, BATCH * count + 1}:
        left = (length - 1) % (BATCH * count) + 1
        ranks = list(range(-(-left // BATCH)))
        samples = list(range(length - left, length))
        for result in group.run(last_step, length):
            assert result["scalar"] == result["element"] == ranks, length
            assert result["row"] == [[rank, rank] for rank in ranks]
            assert result["samples"] == samples
            assert result["twice"] == [number for number in samples for _ in range(2)]
            assert result["object"] == [f"rank {rank}" for rank in ranks]
            assert result["objects"] == [f"sample {number}" for number in samples]
            assert len(result["uneven"]) == sum(rank + BATCH + 1 for rank in range(count))
            assert [int(rank) for rank in result["pickled"]] == ranks


@pytest.mark.usefixtures("fresh_state")
def test_one_process_gets_its_objects_in_their_own_type() -> None:
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(DataLoader(torch.arange(BATCH + 2), batch_size=BATCH)):
        count = len(batch)
        tensor = accelerator.gather_for_metrics(batch, use_gather_object=True)
        assert isinstance(tensor, torch.Tensor)
        assert tensor.tolist() == batch.tolist()
        array = accelerator.gather_for_metrics(batch.numpy())
        assert isinstance(array, np.ndarray)
        assert array.tolist() == batch.tolist()
        assert accelerator.gather_for_metrics(("word",) * count) == ("word",) * count
        # One for each place of a full batch: those beyond the samples are dropped.
        assert accelerator.gather_for_metrics(list(range(BATCH))) == list(range(count))


def test_on_two(two: Processes) -> None:
    check(two, 2)


@pytest.mark.slow
def test_on_three(three: Processes) -> None:
    check(three, 3)


@pytest.mark.slow
def test_on_four(four: Processes) -> None:
    check(four, 4)
