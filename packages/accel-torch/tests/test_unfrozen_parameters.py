"""Parameters that are unfrozen, added or replaced after `prepare`: all replicas train them like one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from accel_state.errors import NotOffered
from accel_testing.backends.reference_loop import near
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    LocalSGD,
)

pytestmark = pytest.mark.usefixtures("fresh_state")

STEPS, CHANGED = 4, 2


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base, self.down, self.up = base, nn.Linear(6, 2, bias=False), nn.Linear(2, 10, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((10, 6), 2.0))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def net(frozen: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not ((name.startswith("0") and frozen == "first") or frozen == "all"))
    return model


def unfreeze(model: nn.Sequential, optimizer: Any) -> None:
    model.requires_grad_(True)


def add(model: nn.Sequential, optimizer: Any) -> None:
    model[0] = Adapted(model[0])
    optimizer.add_param_group({"params": [*model[0].down.parameters(), *model[0].up.parameters()]})


def add_parameter(model: nn.Sequential, optimizer: Any) -> None:
    model[0].register_parameter("scale", nn.Parameter(torch.ones(10)))
    model[0].register_forward_hook(lambda module, inputs, outputs: outputs * module.scale)
    optimizer.add_param_group({"params": [model[0].scale]})


def parametrized(model: nn.Sequential, optimizer: Any) -> None:
    parametrize.register_parametrization(model[0], "weight", Doubled())
    model[0].parametrizations.weight.original.requires_grad_(True)
    optimizer.add_param_group({"params": [model[0].parametrizations.weight[0].factor]})


def replace(model: nn.Sequential, optimizer: Any) -> None:
    model[0].weight = nn.Parameter(torch.full((10, 6), 0.1))
    optimizer.add_param_group({"params": [model[0].weight]})


Change = Callable[[nn.Sequential, Any], None]
CHANGES: dict[str, tuple[str, Change]] = {
    "first frozen": ("first", unfreeze),
    "all frozen": ("all", unfreeze),
    "adapter": ("", add),
    "adapter of frozen": ("first", add),
    "parameter": ("first", add_parameter),
    "parametrization": ("first", parametrized),
    "replaced": ("first", replace),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    return inputs, torch.stack([inputs.sum(1).sin(), inputs.prod(1)], 1)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def reference(change: str) -> dict[str, list[Any]]:
    frozen, function = CHANGES[change]
    model = net(frozen)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        if step == CHANGED:
            function(model, optimizer)
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def accelerator_of(backend: str, **options: Any) -> Accelerator:
    handlers: list[Any] = []
    if backend.startswith("ddp "):
        handlers.append(DistributedDataParallelKwargs(**{backend.removeprefix("ddp "): True}))
    if backend.startswith("fsdp"):
        # Torch's first version cannot save blocks whose parameters have moved into another module.
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(backend[-1]), auto_wrap_policy=lambda module: isinstance(module, nn.Linear)
        )
    return Accelerator(cpu=True, kwargs_handlers=handlers, **options)


def train(backend: str, change: str, how: str = "") -> dict[str, list[Any]] | None:
    """Train; each step in two micro-batches if `how` says so."""
    frozen, function = CHANGES[change]
    pieces = 2 if how else 1
    accelerator = accelerator_of(backend, gradient_accumulation_steps=pieces if how == "accumulate" else 1)
    user = net(frozen)
    model, optimizer = accelerator.prepare(user, optimizer_of(user))
    for step in range(STEPS):
        if step == CHANGED:
            function(accelerator.unwrap_model(model), optimizer)
        mine = [part.chunk(2)[accelerator.process_index].chunk(pieces) for part in batch(step)]
        for index, (inputs, targets) in enumerate(zip(*mine, strict=True)):
            held = how in ("no_sync", "trigger") and (index == 0 or how == "trigger")
            if how == "accumulate":
                context: Any = accelerator.accumulate(model)
            else:
                context = accelerator.no_sync(model) if held else nullcontext()
            with context:
                loss = nn.functional.mse_loss(model(inputs), targets)
                if how in ("no_sync", "trigger"):
                    loss = loss / pieces
                triggered = how == "trigger" and index == pieces - 1 and loss.requires_grad
                with accelerator.trigger_sync_in_backward(model) if triggered else nullcontext():
                    if loss.requires_grad:
                        accelerator.backward(loss)
                if how == "accumulate":
                    optimizer.step()
                    optimizer.zero_grad()
        if how != "accumulate":
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    return {name: value.tolist() for name, value in weights.items()} if accelerator.is_main_process else None


@pytest.mark.parametrize("change", CHANGES)
def test_replicas_train_them_like_one_process(two: Processes, change: str) -> None:
    assert two.run(train, "ddp", change)[0] == near(reference(change))


@pytest.mark.parametrize("how", ["accumulate", "no_sync", "trigger"])
@pytest.mark.parametrize("change", ["first frozen", "all frozen", "adapter"])
def test_their_gradients_are_averaged_over_windows(two: Processes, change: str, how: str) -> None:
    assert two.run(train, "ddp", change, how)[0] == near(reference(change))


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
@pytest.mark.parametrize("change", ["first frozen", "adapter"])
def test_options_of_the_wrapper_change_nothing(two: Processes, option: str, change: str) -> None:
    assert two.run(train, f"ddp {option}", change)[0] == near(reference(change))


@pytest.mark.parametrize(
    ("backend", "change"),
    [("fsdp 1", "first frozen"), ("fsdp 1", "adapter"), ("fsdp 2", "first frozen"), ("fsdp 2", "all frozen"),
     ("fsdp 2", "adapter"), ("fsdp 2", "parameter")],
)  # fmt: skip
def test_sharded_models_train_them_too(two: Processes, backend: str, change: str) -> None:
    assert two.run(train, backend, change)[0] == near(reference(change))


# --------------------------------------------------------------------- processes that differ


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)

    def forward(self, inputs: Tensor, left: bool) -> Tensor:
        outputs: Tensor = self.head((self.left if left else self.right)(inputs))
        return outputs


def use_one_branch() -> dict[str, Any]:
    """Each process uses another of the branches that were unfrozen."""
    accelerator = accelerator_of("ddp")
    user = Branches().requires_grad_(False)
    user.head.requires_grad_(True)
    model = accelerator.prepare(user)
    user.requires_grad_(True)
    accelerator.backward(model(torch.ones(1, 2), accelerator.is_main_process).sum())
    return {name: one.grad.tolist() for name, one in user.named_parameters() if one.grad is not None}


def test_a_process_that_did_not_use_a_parameter_takes_part(two: Processes) -> None:
    user = Branches()
    for left in (True, False):
        (user(torch.ones(1, 2), left).sum() / 2).backward()
    expected = {name: one.grad.tolist() for name, one in user.named_parameters() if one.grad is not None}
    assert "never.weight" not in expected
    for answer in two.run(use_one_branch):
        assert answer == near(expected)


def join() -> str:
    accelerator = accelerator_of("ddp")
    user = net("first")
    model = accelerator.prepare(user)
    user.requires_grad_(True)
    try:
        with accelerator.join_uneven_inputs([model]):
            accelerator.backward(model(batch(0)[0]).sum())
    except NotOffered as error:
        return str(error)
    return "nothing was raised"


def test_processes_that_run_out_of_batches_are_refused(two: Processes) -> None:
    for answer in two.run(join):
        assert "0.weight, 0.bias were frozen or absent" in answer


def train_alone() -> list[Any]:
    accelerator = accelerator_of("ddp")
    user = net("first")
    model, optimizer = accelerator.prepare(user, optimizer_of(user))
    user.requires_grad_(True)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=10) as local:
        accelerator.backward(model(batch(accelerator.process_index)[0]).square().sum() / 100)
        optimizer.step()
        local.step()
        weights: list[Any] = user[0].weight.tolist()
    return [weights, user[0].weight.tolist()]


def test_processes_that_train_alone_do_not_average_gradients(two: Processes) -> None:
    first, second = two.run(train_alone)
    assert first[0] != second[0]
    assert first[1] == second[1]


def frozen_parameters_change() -> dict[str, Any]:
    """What `prepare` leaves as it was."""
    accelerator = accelerator_of("ddp")
    user = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    user[0].requires_grad_(False)
    user[0].register_parameter("counts", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    model = accelerator.prepare(user)
    calls = itertools.count()
    transport = accelerator.session.strategy.context.process.transport
    reduce = transport.all_reduce
    transport.all_reduce = lambda *args, **options: (next(calls), reduce(*args, **options))[1]
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    return {
        "trains": [parameter.requires_grad for parameter in user.parameters()],
        "gradients": [parameter.grad is not None for parameter in user.parameters()],
        "collectives": next(calls),
    }


def test_frozen_parameters_cost_no_collective(two: Processes) -> None:
    for answer in two.run(frozen_parameters_change):
        assert answer == {
            "trains": [False, False, False, True, True],
            "gradients": [False, False, False, True, True],
            "collectives": 0,
        }
