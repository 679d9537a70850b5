"""An Accelerator in a default group that the script made: a rank of a fake world, and ranks that are threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_testing.fresh import fresh
from accel_testing.threads import run_as_threads
from accel_torch import Accelerator


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


def test_a_rank_of_a_fake_world_trains_a_sharded_model() -> None:
    """DistributedDataParallel of torch itself does not work there; FSDP2 does."""
    dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert (accelerator.num_processes, accelerator.process_index) == (64, 3)
    model = torch.nn.Linear(4, 128)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.weight.to_local().shape == (2, 4)
    before = model.weight.to_local().detach().clone()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    # Collectives of a fake world move nothing, so that the values of gradients are what was in their memory.
    assert model.weight.grad.to_local().shape == (2, 4)
    model.weight.grad.to_local().fill_(1.0)
    optimizer.step()
    assert torch.allclose(model.weight.to_local(), before - 0.1)
    assert accelerator.gather(torch.tensor([3])).tolist() == [3] * 64


def on_thread() -> tuple[int, float, list[str]]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    total = accelerator.reduce(torch.tensor(float(rank)), "sum").item()
    with accelerator.split_between_processes([f"item {number}" for number in range(16)]) as mine:
        return rank, total, list(mine)


def test_eight_accelerators_in_threads() -> None:
    expected = [(rank, 28.0, [f"item {2 * rank}", f"item {2 * rank + 1}"]) for rank in range(8)]
    assert run_as_threads(8, on_thread) == expected
