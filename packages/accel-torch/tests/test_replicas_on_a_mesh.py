"""Processes that read the same samples draw the same random numbers and get the same shard of other inputs; what is
unsharded stays equal, or is noticed.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

from accel_ops import gather_object
from accel_ops.rng import set_seed
from accel_state import PartialState
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    ReplicasDiffer,
    TorchTensorParallelPlugin,
)

pytestmark = pytest.mark.usefixtures("fresh_state")

TWICE_SHARDED = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
}
ALONE = {"ACCELERATE_ALLOW_CP_STANDALONE": "true"}


def accelerator_of(sizes: dict[str, int] | None) -> Accelerator:
    options: dict[str, Any] = {}
    if sizes:
        torch_backend = {"sp_backend": "torch"} if "sp_size" in sizes else {}
        options["parallelism_config"] = ParallelismConfig(**sizes, **torch_backend)
    if sizes and "dp_shard_size" in sizes:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, **options)


def draw(sizes: dict[str, int] | None, order: str) -> list[list[int]]:
    """The seed and the first draw of each process."""
    if order == "after":
        accelerator_of(sizes)
        set_seed(40, device_specific=True)
    else:
        if order == "state first":
            PartialState(cpu=True)
        set_seed(40, device_specific=True)
        # As a script that builds its model in between.
        torch.rand(3)
        accelerator_of(sizes)
    return gather_object([[torch.initial_seed() - 40, int(torch.randint(2**31, ()))]])


@pytest.mark.parametrize("order", ["after", "before", "state first"])
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp_shard_size": 2, "tp_size": 2}, [0, 0, 1, 1]),
        ({"dp_replicate_size": 2, "cp_size": 2}, [0, 0, 1, 1]),
        ({"sp_size": 4}, [0, 0, 0, 0]),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, [0, 1, 2, 3]),
        (None, [0, 1, 2, 3]),
    ],
)
def test_the_seed_is_that_of_the_data_shard(
    four: Processes, sizes: dict[str, int] | None, expected: list[int], order: str
) -> None:
    answers = four.run(draw, sizes, order, environment=ALONE)
    assert answers == [answers[0]] * 4
    seeds, drawn = zip(*answers[0], strict=True)
    assert list(seeds) == expected
    assert [drawn.index(number) for number in drawn] == [expected.index(index) for index in expected]


def draw_and_do_not_repeat() -> list[float]:
    """The axes are known from the environment, so the Accelerator does not seed again."""
    set_seed(40, device_specific=True)
    first = torch.rand(()).item()
    Accelerator(cpu=True)
    second = torch.rand(()).item()
    assert first != second
    return [first, second]


def test_axes_of_the_environment_count_before_there_is_a_mesh(four: Processes) -> None:
    answers = four.run(draw_and_do_not_repeat, environment=TWICE_SHARDED)
    assert answers[0] == answers[1] != answers[2] == answers[3]


def seed_alike_afterwards() -> int:
    """A later seed that is the same everywhere stays."""
    set_seed(40, device_specific=True)
    set_seed(7)
    accelerator_of({"dp_shard_size": 2, "tp_size": 2})
    return torch.initial_seed()


def test_a_later_seed_of_all_processes_stays(four: Processes) -> None:
    assert four.run(seed_alike_afterwards) == [7] * 4


def split(sizes: dict[str, int] | None) -> list[int]:
    accelerator = accelerator_of(sizes)
    with accelerator.split_between_processes(list(range(6))) as mine:
        assert isinstance(mine, list)
        return mine


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp_shard_size": 2, "tp_size": 2}, [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2),
        (None, [[0, 1], [2, 3], [4], [5]]),
    ],
)
def test_inputs_are_split_between_data_shards(
    four: Processes, sizes: dict[str, int] | None, expected: list[list[int]]
) -> None:
    assert four.run(split, sizes) == expected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.drop(self.norm(self.down(torch.tanh(self.up(inputs))))))
        return logits


def tensor_parallel(**options: Any) -> Accelerator:
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(tp_size=2),
        torch_tp_plugin=TorchTensorParallelPlugin(parallelize_plan={"up": "colwise", "down": "rowwise"}),
        **options,
    )


def train_with_dropout() -> dict[str, list[Any]]:
    accelerator = tensor_parallel()
    model = Net()
    set_seed(7, device_specific=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        accelerator.backward(nn.functional.mse_loss(prepared(inputs), inputs[:, :2]))
        optimizer.step()
        optimizer.zero_grad()
    parameters = accelerator.unwrap_model(prepared).named_parameters()
    return {name: value.tolist() for name, value in parameters if not hasattr(value, "placements")}


def test_unsharded_parameters_stay_equal_under_dropout(two: Processes) -> None:
    first, second = two.run(train_with_dropout)
    assert "norm.weight" in first
    assert first == second


# ----------------------------------------------------------------- replicas of what tensor parallelism does not shard


def train_with_different_masks(every: int | None, where: str) -> str:
    """Train, and let something that is the same on both processes become different on one of them."""
    messages: list[str] = []
    logger = logging.getLogger("accel_torch.replicas")
    kept = logging.Handler()
    kept.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(kept)
    accelerator = tensor_parallel(**({} if every is None else {"check_replicas_every": every}))
    model = Net()
    set_seed(accelerator.process_index if where == "masks" else 0)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for step in range(4):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            accelerator.backward(nn.functional.mse_loss(prepared(inputs), inputs[:, :2]))
            if where == "shards" and accelerator.process_index:
                with torch.no_grad():
                    prepared.up.weight.to_local().zero_()
            optimizer.step()
            optimizer.zero_grad()
    except ReplicasDiffer as error:
        return str(error)
    for thread in threading.enumerate():
        if thread.name == "accel-replica-comparison":
            thread.join(60)
    accelerator.wait_for_everyone()
    logger.removeHandler(kept)
    return "".join(messages)


def test_unsharded_tensors_beside_sharded_ones_are_compared(two: Processes) -> None:
    for message in two.run(train_with_different_masks, 1, "masks"):
        assert "They differ first in the tensor 'down.bias'" in message
        assert "process 0; process 1" in message
        assert "unfrozen" in message
        assert "bypass" in message


def test_the_comparison_after_the_second_step_finds_them_too(two: Processes) -> None:
    first, second = two.run(train_with_different_masks, None, "masks")
    assert "first in 'down.bias'" in first
    assert second == ""


@pytest.mark.parametrize("every", [1, None])
@pytest.mark.parametrize("where", ["nothing", "shards"])
def test_shards_that_differ_are_no_difference(two: Processes, where: str, every: int | None) -> None:
    assert two.run(train_with_different_masks, every, where) == ["", ""]
