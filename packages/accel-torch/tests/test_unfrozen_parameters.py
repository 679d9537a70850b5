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
from accel_testing.recording_transport import recording
from accel_torch import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    LocalSGD,
    ReplicasDiffer,
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


class Optional(nn.Module):
    """A model of which some micro-batches do not use the layer `extra`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.extra = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, inputs: Tensor, extra: bool) -> Tensor:
        outputs: Tensor = self.always(inputs)
        return outputs + self.extra(inputs) if extra else outputs


USES = {"first micro-batch": lambda rank, index: index == 0, "one process": lambda rank, index: rank == 1}


def optional_of(backend: str, pieces: int) -> tuple[Accelerator, Any]:
    """An Accelerator, and the model whose layer `extra` the wrapper leaves alone."""
    options: dict[str, Any] = {"gradient_accumulation_steps": pieces}
    if backend.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(backend[-1]), ignored_modules="extra", auto_wrap_policy="NO_WRAP"
        )
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=[] if backend.startswith("fsdp") else handlers, **options)
    model = Optional()
    if backend == "ddp frozen":
        model.extra.requires_grad_(False)
    if backend == "ddp all frozen":
        model.requires_grad_(False)
    return accelerator, model


def train_windows(backend: str, use: str) -> list[float]:
    """The weights of `extra` after two windows of two micro-batches."""
    accelerator, user = optional_of(backend, 2)
    model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), lr=0.1))
    user.requires_grad_(True)
    for index in range(4):
        with accelerator.accumulate(model):
            inputs = torch.full((1, 2), accelerator.process_index + index + 1.0)
            extra = USES[use](accelerator.process_index, index % 2)
            accelerator.backward(model(inputs, extra).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    weights: list[float] = accelerator.unwrap_model(model).extra.weight.flatten().tolist()
    return weights


def windows_in_one_process(use: str) -> list[float]:
    model = Optional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        for rank in range(2):
            loss = model(torch.full((1, 2), rank + index + 1.0), USES[use](rank, index % 2)).square().sum()
            (loss / 4).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    weights: list[float] = model.extra.weight.flatten().tolist()
    return weights


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", ["ddp", "ddp frozen", "ddp all frozen", "fsdp 1", "fsdp 2"])
def test_parameters_that_some_micro_batches_do_not_use(two: Processes, backend: str, use: str) -> None:
    for weights in two.run(train_windows, backend, use):
        assert weights == near(windows_in_one_process(use))


def collectives_of_a_window() -> list[str]:
    """Each micro-batch has a gradient, and the norm is clipped."""
    with recording() as records:
        accelerator, user = optional_of("ddp frozen", 4)
        model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), lr=0.1))
        user.requires_grad_(True)
        for window in range(2):
            if window:
                records.clear()
            for _ in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 2), True).sum())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
        return [record.operation for record in records]


def test_a_window_is_averaged_once(two: Processes) -> None:
    assert two.run(collectives_of_a_window) == [["all_reduce"]] * 2


def train_by(how: str) -> list[Any]:
    """Train without the calls of the Accelerator that usually average the gradients."""
    accelerator, user = optional_of("ddp frozen", 1)
    prepared = how != "script's optimizer"
    optimizer = torch.optim.SGD(user.parameters(), lr=0.1)
    model = accelerator.prepare(user)
    optimizer = accelerator.prepare(optimizer) if prepared else optimizer
    user.requires_grad_(True)
    inputs = torch.full((1, 2), accelerator.process_index + 1.0)

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(inputs, accelerator.is_main_process).square().sum()
        if how == "loss.backward()":
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            accelerator.backward(loss)
        return loss

    for _ in range(2):
        if how == "closure":
            optimizer.step(compute)
            continue
        compute()
        if how == "script's clipping":
            nn.utils.clip_grad_norm_(user.parameters(), 0.1)
        optimizer.step()
    weights: list[Any] = user.extra.weight.tolist()
    return [weights, user.always.weight.tolist()]


@pytest.mark.parametrize("how", ["loss.backward()", "closure", "script's optimizer", "script's clipping"])
def test_replicas_stay_equal_with_calls_of_the_script(two: Processes, how: str) -> None:
    first, second = two.run(train_by, how)
    assert first == second
    assert first[0] != Optional().extra.weight.tolist()


def unfreeze_one() -> str:
    accelerator = accelerator_of("ddp", check_replicas_every=1)
    user = net("first")
    model, optimizer = accelerator.prepare(user, optimizer_of(user))
    if accelerator.is_main_process:
        user[0].weight.requires_grad_(True)
    try:
        for step in range(2):
            accelerator.backward(model(batch(step)[0]).sum())
            optimizer.step()
    except ReplicasDiffer as error:
        return str(error)
    return "nothing was raised"


def unfreeze_others() -> str:
    """Each process unfreezes another parameter."""
    accelerator = accelerator_of("ddp")
    user = net("first")
    model = accelerator.prepare(user)
    (user[0].weight if accelerator.is_main_process else user[0].bias).requires_grad_(True)
    try:
        accelerator.backward(model(batch(0)[0]).sum())
    except ReplicasDiffer as error:
        return str(error)
    return "nothing was raised"


def test_a_parameter_that_one_process_unfreezes_is_an_error_on_all(two: Processes) -> None:
    first, second = two.run(unfreeze_one)
    assert "The processes train different parameters." in first
    assert "On this process 0.weight train" in first
    assert "The replicas differ after 1 optimizer steps" in second
    for message in (first, second):
        assert "backward() at" in message


def test_processes_that_unfreeze_different_parameters_all_raise(two: Processes) -> None:
    first, second = two.run(unfreeze_others)
    assert "On this process 0.weight train" in first
    assert "On this process 0.bias train" in second


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.others = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
        self.head = nn.Linear(2, 1)

    def forward(self, indices: Tensor, others: bool) -> Tensor:
        outputs: Tensor = self.head(self.words(indices) + (self.others(indices) if others else 0))
        return outputs


def train_words() -> list[Any]:
    """One process does not use the second embedding."""
    accelerator = accelerator_of("ddp")
    user = Words()
    embeddings = [user.words.weight, user.others.weight]
    for weight in embeddings:
        weight.requires_grad_(False)
    model, optimizer = accelerator.prepare(user, torch.optim.SparseAdam(embeddings, lr=0.1))
    for weight in embeddings:
        weight.requires_grad_(True)
    for _ in range(2):
        indices = torch.tensor([0, accelerator.process_index + 1])
        accelerator.backward(model(indices, accelerator.is_main_process).sum())
        optimizer.step()
        optimizer.zero_grad()
    return [weight.tolist() for weight in embeddings]


def test_sparse_gradients_are_averaged_and_stay_sparse(two: Processes) -> None:
    model = Words()
    optimizer = torch.optim.SparseAdam([model.words.weight, model.others.weight], lr=0.1)
    for _ in range(2):
        for rank in range(2):
            (model(torch.tensor([0, rank + 1]), rank == 0).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in two.run(train_words):
        assert weights == near([model.words.weight.tolist(), model.others.weight.tolist()])


def prepare_for_inference() -> list[bool]:
    accelerator = accelerator_of("ddp")
    with torch.inference_mode():
        model = nn.Linear(2, 2).requires_grad_(False)
    return [parameter.requires_grad for parameter in accelerator.prepare(model).parameters()]


def test_a_model_that_was_made_in_inference_mode_is_prepared(two: Processes) -> None:
    assert two.run(prepare_for_inference) == [[False, False]] * 2


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


def join(*frozen: str) -> str:
    """Processes with two batches and with one train models together, which are unfrozen after `prepare`."""
    accelerator = accelerator_of("ddp")
    users = [net(kind) for kind in frozen]
    models = [accelerator.prepare(user) for user in users]
    for user in users:
        user.requires_grad_(True)
    try:
        with accelerator.join_uneven_inputs(models):
            for step in range(2 - accelerator.process_index):
                accelerator.backward(sum((model(batch(step)[0]).sum() for model in models), torch.zeros(())))
    except NotOffered as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("frozen", [("first",), ("", "all"), ("", "first")], ids="-".join)
def test_processes_that_run_out_of_batches_are_refused(two: Processes, frozen: tuple[str, ...]) -> None:
    for answer in two.run(join, *frozen):
        assert "0.weight, 0.bias" in answer
        assert "were frozen or absent" in answer


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
