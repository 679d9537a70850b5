"""Two processes train as replicas, each on an XLA device of its own, which is the CPU.

The runtime of torch_xla connects no processes on CPUs: two of its collectives take the way over gloo here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.precision import choose
from accel_plugins.xla.config import XLAPlugin
from accel_state.current import Process
from accel_state.devices.xla import XLA
from accel_state.gradient import GradientAccumulationPlugin, GradientState
from accel_state.labels import DistributedType
from accel_state.process import PartialState
from accel_state.settings.installed import importable
from accel_state.topology import Topology
from accel_state.transport.xla import XLATransport
from accel_testing.processes import Processes

pytestmark = [
    pytest.mark.skipif(not importable("torch_xla"), reason="needs torch_xla: nox -s engines-xla"),
    pytest.mark.timeout(600),
]

REPLICAS, CLIPPED, STEPS = 2, 0.5, 3


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with mock.patch.dict(os.environ, {"PJRT_DEVICE": "CPU"}), Processes(REPLICAS, timeout=300) as group:
        yield group


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    mine = value.cpu()
    parts = [torch.empty_like(mine) for _ in range(REPLICAS)]
    dist.all_gather(parts, mine)
    return torch.cat(parts, dim).to(value.device)


def all_reduce(reduce_type: str, inputs: list[torch.Tensor], scale: float = 1.0, **_: Any) -> None:
    for tensor in inputs:
        reduced = tensor.cpu()
        dist.all_reduce(reduced, getattr(dist.ReduceOp, reduce_type.upper()))
        tensor.copy_(reduced * scale)


def network(seed: int) -> nn.Module:
    model, draw = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs (8, 8) and targets (8, 3) of each step, for all replicas together."""
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 8, generator=draw), torch.randn(8, 3, generator=draw)) for _ in range(STEPS)]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def alone(clipped: bool) -> list[torch.Tensor]:
    """The weights after training on all samples, from those that the first replica has."""
    model = network(0)
    optimizer = optimizer_of(model)
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
    return list(model.state_dict().values())


@contextmanager
def strategy_of_this_replica() -> Iterator[Any]:
    import torch_xla.core.xla_model as xla_model
    import torch_xla.runtime as runtime

    from accel_plugins.xla.strategy import XLAStrategy

    rank = PartialState(cpu=True).process_index
    device, family = torch.device("xla", 0), XLA()
    with (
        mock.patch.multiple(xla_model, all_gather=all_gather, all_reduce=all_reduce),
        mock.patch.object(runtime, "world_size", return_value=REPLICAS),
    ):
        way = XLATransport(device, timedelta(seconds=300))
        process = Process(Topology(rank=rank, world_size=REPLICAS), device, family, way, DistributedType.XLA)
        gradient = GradientState.of(GradientAccumulationPlugin())
        yield XLAStrategy(Context(process, gradient, choose("no", family)), XLAPlugin())


def replica(micro: int | None) -> dict[str, Any]:
    """Train one replica on every second sample, from weights of its own.

    Args:
        micro: micro-batches of a step; None lets the optimizer compute gradients by a closure, without clipping.
    """
    with strategy_of_this_replica() as strategy:
        rank, device = strategy.context.process.rank, strategy.context.process.device
        model = strategy.place(network(rank))
        optimizer = optimizer_of(model)
        strategy.setup(Bundle.of([model, optimizer]))
        for batch in batches():
            inputs, targets = (tensor[rank::REPLICAS].to(device) for tensor in batch)
            step(strategy, model, optimizer, inputs, targets, micro)
        weights = [value.tolist() for value in strategy.state_dict(model).values()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0 + rank)
        strategy.average_parameters(model)
        return {"weights": weights, "averaged": strategy.state_dict(model)["0.bias"].tolist()}


def step(
    strategy: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    micro: int | None,
) -> None:
    def compute(parts: int = 1) -> None:
        optimizer.zero_grad()
        for one, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            strategy.backward(loss_of(model, one, wanted) / parts)

    if micro is None:
        strategy.step(optimizer, compute)
        return
    compute(micro)
    strategy.finalize_gradients(optimizer)
    assert strategy.context.gradient.is_xla_gradients_synced
    strategy.clip_norm(model.parameters(), CLIPPED)
    # The wrapped optimizer asks again when it steps: what is reduced already is not reduced twice.
    strategy.finalize_gradients(optimizer)
    strategy.step(optimizer)


@pytest.mark.parametrize("micro", [1, 2, None])
def test_two_replicas_average_their_gradients_and_train_like_one(group: Processes, micro: int | None) -> None:
    expected = alone(clipped=micro is not None)
    for answer in group.run(replica, micro):
        for weight, right in zip(answer["weights"], expected, strict=True):
            assert torch.allclose(torch.tensor(weight), right, rtol=1e-4, atol=1e-5)
        assert answer["averaged"] == [1.5] * 6
