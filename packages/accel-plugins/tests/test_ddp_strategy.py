"""Data parallelism in two real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_plugins import (
    Bundle,
    Context,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    Shards,
    Strategy,
    extract_model_from_parallel,
)
from accel_plugins.precision import choose
from accel_plugins.resolve import build
from accel_plugins.resolve import choose as choose_backend
from accel_state import PartialState, current
from accel_state.errors import Conflict, NotOffered, SettingError
from accel_state.gradient import GradientState
from accel_state.labels import DEVICE_MAP
from accel_testing.processes import Processes


def started(precision: str = "no", **options: Any) -> Strategy:
    PartialState(cpu=True)
    process = current.process()
    context = Context(process, GradientState(), choose(precision, process.family))
    return build(choose_backend(), DistributedDataParallelKwargs(**options), context)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def losses_of(strategy: Strategy | None, accumulation: int = 1, steps: int = 3) -> list[float]:
    """Losses of the whole batch before each step; without a strategy in plain torch on the whole batch."""
    net: nn.Module = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    shards = Shards(1, 0)
    if strategy is not None:
        shards = strategy.shards()
        net = strategy.setup(Bundle.of([net, optimizer])).models[0]
    inputs, targets = data()
    losses = []
    for _ in range(steps):
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(extract_model_from_parallel(net)(inputs), targets).item())
        size = len(inputs) // accumulation
        for number in range(accumulation):
            mine = slice(number * size + shards.index * size // shards.count, None)
            part = slice(mine.start, mine.start + size // shards.count)
            loss = nn.functional.mse_loss(net(inputs[part]), targets[part]) / accumulation
            if strategy is None:
                loss.backward()
            elif number < accumulation - 1:
                with strategy.no_sync(net):
                    loss = nn.functional.mse_loss(net(inputs[part]), targets[part]) / accumulation
                    strategy.backward(loss)
            else:
                strategy.backward(loss)
        if strategy is None:
            optimizer.step()
        else:
            strategy.finalize_gradients(optimizer)
            assert strategy.step(optimizer)
        optimizer.zero_grad()
    return losses


def train(accumulation: int, precision: str, options: dict[str, Any]) -> list[float]:
    return losses_of(started(precision, **options), accumulation)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"static_graph": True, "gradient_as_bucket_view": True}, {"comm_hook": "bf16"}],
    ids=str,
)
def test_losses_equal_those_of_one_process_with_the_whole_batch(
    two: Processes, accumulation: int, options: dict[str, Any]
) -> None:
    expected = losses_of(None, accumulation)
    precise = "comm_hook" not in options

    for losses in two.run(train, accumulation, "no", options):
        assert losses == pytest.approx(expected, rel=1e-5 if precise else 0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"comm_hook": "fp16"},
        {"comm_hook": "bf16"},
        {"comm_hook": "fp16", "comm_wrapper": "no"},
        {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}},
        {"comm_hook": "batched_power_sgd", "comm_state_option": {"start_powerSGD_iter": 2}},
        {"comm_hook": "power_sgd", "comm_wrapper": "fp16", "comm_state_option": {"start_powerSGD_iter": 2}},
        {"comm_hook": "power_sgd", "comm_wrapper": "bf16", "comm_state_option": {"start_powerSGD_iter": 2}},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
        {"find_unused_parameters": True, "broadcast_buffers": False},
    ],
)
def test_hooks_and_options_train_too(two: Processes, options: dict[str, Any]) -> None:
    expected = losses_of(None)
    first, second = two.run(train, 1, "no", options)

    assert first == second
    assert first == pytest.approx(expected, rel=0.05)


def unwrapped_and_hooked() -> dict[str, Any]:
    strategy = started(comm_hook=DDPCommunicationHookType.FP16)
    net, frozen = model(), model().requires_grad_(False)
    bundle = strategy.setup(Bundle.of([net, frozen]))
    wrapped = bundle.models[0]
    with torch.no_grad():
        net[0].weight.fill_(current.process().rank)
    version = net[0].weight._version
    strategy.average_parameters(wrapped)
    return {
        "counted": net[0].weight._version > version,
        "wrapped": isinstance(wrapped, DistributedDataParallel),
        "unwrapped": strategy.unwrap(wrapped) is net and extract_model_from_parallel(wrapped) is net,
        "frozen": bundle.models[1] is frozen and strategy.unwrap(frozen) is frozen,
        "names": sorted(strategy.state_dict(wrapped)) == sorted(net.state_dict()),
        "mean": net[0].weight.unique().tolist(),
        "shards": (strategy.shards().count, strategy.shards().index),
        "label": choose_backend().label,
    }


def test_models_are_wrapped_and_unwrapped_and_averaged(two: Processes) -> None:
    for rank, seen in enumerate(two.run(unwrapped_and_hooked)):
        assert seen == {
            "counted": True,
            "wrapped": True,
            "unwrapped": True,
            "frozen": True,
            "names": True,
            "mean": [0.5],
            "shards": (2, rank),
            "label": None,
        }


def gradients_around_no_sync(static_graph: bool) -> list[float]:
    strategy = started(static_graph=static_graph)
    net = nn.Linear(1, 1, bias=False)
    wrapped = strategy.setup(Bundle.of([net])).models[0]
    mine = torch.full((1, 1), float(current.process().rank + 1))
    seen = []
    with strategy.no_sync(wrapped):
        strategy.backward(wrapped(mine).sum())
        seen.append(net.weight.grad.item())
        with strategy.no_sync(wrapped):
            strategy.backward(wrapped(mine).sum())
        strategy.backward(wrapped(mine).sum())
        late = wrapped(mine).sum()
    with strategy.sync_in_next_backward(wrapped):
        strategy.backward(late)
    seen.append(net.weight.grad.item())
    strategy.backward(wrapped(mine).sum())
    seen.append(net.weight.grad.item())
    return seen


def test_gradients_stay_apart_without_sync_and_meet_in_the_next_backward(two: Processes) -> None:
    # 1 and 2 by themselves; four of them averaged; then one more, averaged.
    assert two.run(gradients_around_no_sync, False) == [[1.0, 6.0, 7.5], [2.0, 6.0, 7.5]]


def test_a_static_graph_averages_in_each_backward(two: Processes) -> None:
    assert two.run(gradients_around_no_sync, True) == [[1.5, 6.0, 7.5]] * 2


def passes_are_local(static_graph: bool) -> bool:
    strategy = started(static_graph=static_graph)
    return strategy.passes_are_local(strategy.setup(Bundle.of([nn.Linear(1, 1)])).models[0])


def test_only_a_static_graph_has_collectives_under_no_sync(two: Processes) -> None:
    assert two.run(passes_are_local, False) == [True, True]
    assert two.run(passes_are_local, True) == [False, False]


def late_sync_with_unused_parameters() -> str:
    strategy = started(find_unused_parameters=True)
    wrapped = strategy.setup(Bundle.of([nn.Linear(1, 1)])).models[0]
    try:
        strategy.sync_in_next_backward(wrapped)
    except NotOffered as error:
        return str(error)
    return ""


def test_a_late_sync_is_refused_where_it_would_go_wrong(two: Processes) -> None:
    assert all("find_unused_parameters" in text for text in two.run(late_sync_with_unused_parameters))


def uneven_loop() -> float:
    strategy = started()
    net = nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    wrapped = strategy.setup(Bundle.of([net])).models[0]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with strategy.join([wrapped]):
        for _ in range(2 + 3 * current.process().rank):
            strategy.backward(wrapped(torch.ones(1, 1)).sum())
            strategy.step(optimizer)
            optimizer.zero_grad()
    return round(net.weight.item(), 5)


def test_processes_may_run_out_of_batches_at_different_times(two: Processes) -> None:
    first, second = two.run(uneven_loop)

    assert first == second
    assert first != round(1 - 0.1 * 2, 5)


def refused_device_map() -> str:
    strategy = started()
    net = model()
    setattr(net, DEVICE_MAP, {"0": "cpu", "2": "disk"})
    try:
        strategy.check(Bundle.of([net]))
    except Conflict as error:
        return str(error)
    return ""


def test_a_model_spread_over_devices_is_refused(two: Processes) -> None:
    assert all("cpu, disk" in text for text in two.run(refused_device_map))


def overflow_on_one_process() -> list[bool]:
    strategy = started("fp16")
    net = nn.Linear(2, 1)
    wrapped = strategy.setup(Bundle.of([net])).models[0]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    stepped = []
    for bad in (True, False):
        scale = float("inf") if bad and current.process().rank == 1 else 1.0
        strategy.backward(wrapped(torch.ones(1, 2)).sum() * scale)
        stepped.append(strategy.step(optimizer))
        optimizer.zero_grad()
    return stepped


def test_an_overflow_on_one_process_skips_the_step_on_all(two: Processes) -> None:
    assert two.run(overflow_on_one_process) == [[False, True]] * 2


def test_hooks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SettingError, match="power_sgd"):
        DistributedDataParallelKwargs(comm_hook="zip")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="comm_wrapper"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")  # type: ignore[arg-type]


def bad_power_sgd() -> str:
    strategy = started(comm_hook="power_sgd", comm_state_option={"rank": 3})
    try:
        strategy.setup(Bundle.of([model()]))
    except SettingError as error:
        return str(error)
    return ""


def test_bad_options_of_a_hook_are_refused(two: Processes) -> None:
    assert all("PowerSGDState" in text for text in two.run(bad_power_sgd))


def test_only_arguments_of_torch_reach_torch() -> None:
    settings = DistributedDataParallelKwargs(bucket_cap_mb=7, comm_hook="fp16")  # type: ignore[arg-type]

    assert settings.to_kwargs() == {"bucket_cap_mb": 7}
    assert settings.comm_hook is DDPCommunicationHookType.FP16
    assert "comm_hook" in settings.to_dict(ignore_keys=())
