"""Functions that the suite's tests call inside the processes; each returns plain data to compare."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from accel_data import prepare_data_loader
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.layers import extract_model_from_parallel, strategy_model
from accel_plugins.manifest import SAVED_KINDS, Manifest, ObjectKind
from accel_plugins.prepared import as_set_up
from accel_plugins.transform import Stage, Transform
from accel_state import current
from accel_state.errors import AccelError, CheckpointError
from accel_state.process import PartialState
from accel_state.protocol.call import barrier
from accel_testing.backends.reference_loop import Case, Plain, Training, batches, loss_of, make_optimizer

Answer = dict[str, Any]


def train(case: Case) -> Answer:
    """Train, and return everything that can be compared."""
    training = case.open()
    losses, norms = training.train()
    return {
        "losses": losses,
        "norms": norms,
        "rates": training.rates,
        "weights": training.weights(),
        "beside": [training.weights(model) for model, _ in training.others],
        "shards": _shards(training),
        "batches_per_step": training.strategy.batches_per_step(),
    }


def train_or_refuse(case: Case) -> Answer:
    """Train, or return the error with which the backend refuses the objects."""
    try:
        return train(case)
    except AccelError as error:
        return {"refused": str(error)}


FOLLOWED = 13
"""Steps of runs that are compared step by step: at least two periods of up to six steps, and not a multiple of any."""


def train_alone(case: Case, seed: int) -> Answer:
    """Weights of a model that trains without another one beside."""
    training = case.open(case.make(seed))
    training.train()
    return {"weights": training.weights()}


def follow(case: Case) -> Answer:
    """The micro-batches of this process, and the weights after each step."""
    training, taken, weights = case.open(), [], []
    for batch in batches(case):
        taken.append([(inputs.cpu(), targets.cpu()) for inputs, targets in training.micro_batches(batch)])
        training.train([batch])
        weights.append(training.weights())
    return {"batches": taken, "weights": weights}


def equal_parts(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Half of each global batch."""
    return [(inputs[: len(inputs) // 2], targets[: len(targets) // 2]) for inputs, targets in batches(case)]


def train_on_equal_data(case: Case) -> Answer:
    """Losses and weights of a run in which all processes have equal batches: those of `equal_parts`."""
    training = case.open()
    count = training.strategy.shards().count
    losses, _ = training.train([(torch.cat([i] * count), torch.cat([t] * count)) for i, t in equal_parts(case)])
    return {"losses": losses, "weights": training.weights()}


def train_at_rate_zero(case: Case) -> Answer:
    """Weights before and after training with a learning rate of 0."""
    training = case.open()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    before = training.weights()
    training.train()
    return {"before": before, "after": training.weights()}


def train_on_a_convex_loss(case: Case) -> Answer:
    """The loss of one global batch with the weights of the run, before and after training on that batch."""
    training, batch = case.open(), next(iter(batches(case)))
    for group in training.optimizer.param_groups:
        group["lr"], group["momentum"] = 0.1, 0.0

    def loss() -> float:
        with training.strategy.global_weights(training.made):
            weights = training.strategy.state_dict(training.made)
            if not writes(training):
                return 0.0
            plain = case.make()
            plain.load_state_dict({name: value.cpu() for name, value in weights.items()})
        return float(loss_of(plain, *batch))

    before = loss()
    training.train([batch] * case.steps)
    return {"weights_written": writes(training), "before": before, "after": loss()}


def complete_twice(case: Case) -> Answer:
    """Gradients after they were completed, and after they were completed again, in the second step of a run."""
    training = case.open()
    first, second = list(batches(case))[:2]
    training.train([first])
    training.backward(second)
    training.complete_gradients()
    once = training.gradients()
    training.complete_gradients()
    return {"once": once, "again": training.gradients()}


def train_branches(case: Case) -> Answer:
    """Weights after steps in which each process uses the branch of its shard."""
    training = case.open()
    index = _shards(training)[1]
    branching: Any = training.strategy.unwrap(training.made)
    branching.branch = index % 2
    training.train()
    return {"weights": training.weights(), "shard": index}


def train_branches_plain(case: Case, shards: list[int]) -> Answer:
    """`train_branches` in plain torch."""
    model: Any = case.make()
    optimizer, count = make_optimizer(case, model), max(shards) + 1
    for inputs, targets in batches(case):
        for index, part in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            model.branch = index % 2
            (loss_of(model, *part) / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return session_lists(model.state_dict())


def _shards(training: Training) -> tuple[int, int]:
    shards = training.strategy.shards()
    return shards.count, shards.index


def is_present(case: Case) -> object:
    """The result of the manifest's `present` for this process."""
    assert case.manifest.present is not None
    PartialState(cpu=True)
    module, _, function = case.manifest.present.partition(":")
    return getattr(importlib.import_module(module), function)(current.process())


def look_at_prepared(case: Case) -> Answer:
    """Whether model and optimizer are wrapped, and have the parameters that train."""
    training = case.open()
    trained = {id(parameter) for parameter in training.model.parameters()}
    held = [id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]]
    bare = training.strategy.unwrap(training.made)
    return {
        "held_but_not_trained": len(set(held) - trained),
        "trained_but_not_held": len(trained - set(held)),
        "held_twice": len(held) - len(set(held)),
        "is_users_class": isinstance(bare, type(training.user_model)),
        "names": sorted(name for name, _ in bare.named_parameters()),
        "same_again": training.strategy.unwrap(bare) is bare,
    }


def look_at_start(case: Case) -> Answer:
    """Weights, buffers and random numbers after `prepare`, when each process has a different seed."""
    training = case.but(own_start=True).open()
    bare: nn.Module = training.strategy.unwrap(training.made)
    return {
        "weights": training.weights(),
        "buffers": {name: buffer.tolist() for name, buffer in bare.named_buffers()},
        "first": session_lists(case.make(0).state_dict()),
        "shard": _shards(training)[1],
        "draws": torch.rand(4).tolist(),
    }


def read_loader(case: Case) -> Answer:
    """The batches of two epochs of a prepared loader, its length, and the expected batches."""
    training, data = case.open(), list(batches(case))
    loader: Any = training.loader(data)
    epochs = [[[part.tolist() for part in batch] for batch in loader] for _ in range(2)]
    mine = [[part.tolist() for part in training.slice(batch)] for batch in data]
    return {"epochs": epochs, "length": len(loader), "expected": mine}


def weights_of_the_run(case: Case) -> Answer:
    """Weights inside `global_weights`, and whether the model has its training weights again afterwards."""
    training = case.open()
    training.train()
    before = states(training)
    with training.strategy.global_weights(training.made):
        inside = training.weights()
    with suppress(LookupError), training.strategy.global_weights(training.made):
        raise LookupError("the evaluation failed")
    return {"inside": inside, "changed": differences(before, states(training))}


def check_twice(case: Case) -> Answer:
    """Whether `check` leaves the objects unchanged."""
    training = case.open()
    model = case.make(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bundle = Bundle.of([model, optimizer])
    before = [(id(p), p.detach().clone()) for p in model.parameters()], vars(model).keys() | set()
    training.strategy.check(bundle)
    training.strategy.check(bundle)
    after = [(id(p), p) for p in model.parameters()]
    return {
        "same_objects": bundle.models == [model] and bundle.optimizers == [optimizer],
        "same_parameters": [i for i, _ in before[0]] == [i for i, _ in after],
        "same_values": all(
            a.dtype is b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(before[0], after, strict=True)
        ),
        "same_attributes": vars(model).keys() == before[1],
    }


def forward_and_unwrap(case: Case) -> Answer:
    """Outputs of the prepared model before and after unwrapping, and of the plain model."""
    training = case.open()
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        first = training.model(inputs)
        training.strategy.unwrap(training.made)
        training.strategy.state_dict(training.made)
        second = training.model(inputs)
        plain = case.make().to(training.process.device)(inputs)
    return {"first": first.tolist(), "second": second.tolist(), "plain": plain.tolist(), "dtype": str(first.dtype)}


def call_as_users_do(case: Case) -> Answer:
    """Outputs for an input passed by name, those of the plain model, and modes after `eval` and `train`."""
    training = case.open()
    bare: nn.Module = training.strategy.unwrap(training.made)
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        named = training.model(inputs=inputs)
        plain = case.make().to(training.process.device)(inputs)
    modes = []
    for switch in (training.model.eval, training.model.train):
        switch()
        modes.append({module.training for module in bare.modules()})
    return {"named": named.tolist(), "plain": plain.tolist(), "modes": modes}


def build_inside(case: Case) -> Answer:
    """Weights of a prepared model that was built inside `init_module`, and the expected ones of the first process."""
    training = case.open()

    def build() -> nn.Module:
        if ":" in case.model:
            return case.make()
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    torch.manual_seed(3)
    expected = session_lists(build().state_dict())
    torch.manual_seed(3 + training.process.rank)
    with training.strategy.init_module():
        model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (made,) = training.prepare(Bundle.of([model, optimizer])).models
    found = session_lists(training.strategy.state_dict(strategy_model(made)))
    # Other devices generate other random numbers.
    compared = training.process.device.type == "cpu" and writes(training)
    return {"weights": found if compared else expected, "expected": expected}


def prepare_without_optimizer(case: Case) -> Answer:
    """Outputs of a model that is only evaluated, and of the plain model."""
    training = case.open()
    prepared = training.prepare_to_evaluate(case.make(2)).eval()
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        plain = case.make(2).eval().to(training.process.device)(inputs)
        return {"outputs": prepared(inputs).tolist(), "plain": plain.tolist()}


def several_models(case: Case) -> Answer:
    """Train two models, prepared in one call with an optimizer each, alternately."""
    training = case.open()
    models = [case.make(1), case.make(2)]
    bundle = training.prepare(Bundle.of([*models, *[torch.optim.SGD(m.parameters(), lr=0.3) for m in models]]))
    for number, batch in enumerate(batches(case)):
        chosen: int = number % 2
        inputs, targets = training.slice(batch)
        training.strategy.backward(case.loss(bundle.models[chosen], inputs, targets), bundle.models[chosen])
        bundle.optimizers[chosen].step()
        bundle.optimizers[chosen].zero_grad()
    states = [training.strategy.state_dict(model) for model in bundle.models]
    return {"weights": [{n: v.tolist() for n, v in state.items()} for state in states] if writes(training) else []}


def several_models_plain(case: Case) -> list[dict[str, Any]]:
    """`several_models` in plain torch."""
    models = [case.make(1), case.make(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
    for number, (inputs, targets) in enumerate(batches(case)):
        chosen = number % 2
        loss_of(models[chosen], inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizers[chosen].step()
        optimizers[chosen].zero_grad()
    return [{name: value.tolist() for name, value in model.state_dict().items()} for model in models]


def no_sync_of_one(case: Case) -> Answer:
    """The number of collectives in a pass of each of two models, outside `no_sync` and inside the second model's."""
    training = case.open()
    other = case.make(1)
    bundle = training.prepare(Bundle.of([other, torch.optim.SGD(other.parameters(), lr=0.3)]))
    models, optimizers = [training.model, bundle.models[0]], [training.inner, as_set_up(bundle.optimizers[0])]
    inputs, targets = training.slice(next(iter(batches(case))))

    def backward(index: int, complete: bool = True) -> None:
        training.strategy.backward(case.loss(models[index], inputs, targets), strategy_model(models[index]))
        if complete:
            training.strategy.finalize_gradients(optimizers[index])

    for index in (0, 1, 0, 1):
        backward(index)  # The first backward pass may include work that a backend does once.
    outside = [_collectives(partial(backward, index))[0] for index in range(2)]
    with training.strategy.no_sync(strategy_model(models[1])):
        inside = [_collectives(partial(backward, index, complete=not index))[0] for index in range(2)]
    return {"outside": outside, "inside": inside}


def writes(training: Training) -> bool:
    """Whether this process has complete weights."""
    return training.strategy.writes_weights()


# ------------------------------------------------------------------------------- sync


def count_collectives(case: Case) -> Answer:
    """(collectives, reductions): one backward, one under `no_sync`, two under nested `no_sync`, one afterwards.

    The gradients of the first and the last are completed, because a strategy may average them only then. Between the
    last two cases, a block of `no_sync` ends with an exception.
    """
    training = case.open()
    inputs, targets = training.slice(next(iter(batches(case))))

    def backward() -> None:
        training.strategy.backward(training.loss(inputs, targets), training.made)

    def complete() -> None:
        backward()
        training.strategy.finalize_gradients(training.inner)

    def held() -> None:
        with training.strategy.no_sync(training.made):
            backward()

    def nested() -> None:
        with training.strategy.no_sync(training.made):
            with training.strategy.no_sync(training.made):
                backward()
            backward()

    for _ in range(2):
        complete()  # The first backward pass may include work that a backend does once.
    actions = {"sync": complete, "held": held, "nested": nested}
    counted = {name: _collectives(action) for name, action in actions.items()}
    with suppress(LookupError), training.strategy.no_sync(training.made):
        raise LookupError("the batch failed")
    return {**counted, "again": _collectives(complete)}


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the collectives of a block: torch's operators, and those that a group in Python reports.

    torch's profiler sees them too, but its end races with the threads of gloo that run a communication hook, which
    crashes the process.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = operator.name() == "profiler::_record_function_enter_new"
        name = str(args[0]) if record else operator.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


def _collectives(action: Callable[[], None]) -> tuple[int, int]:
    with _Recorded() as recorded:
        action()
    return len(recorded.names), sum("reduce" in name for name in recorded.names)


def gradients_of(case: Case, late: bool = False) -> Answer:
    """Gradients of one global batch; with `late`, forward runs under `no_sync` and backward synchronises."""
    training = case.open()
    batch = next(iter(batches(case)))
    if late:
        inputs, targets = training.slice(batch)
        with training.strategy.no_sync(training.made):
            loss = training.loss(inputs, targets)
        with training.strategy.sync_in_next_backward(training.made):
            training.strategy.backward(loss)
    else:
        training.backward(batch)
    training.complete_gradients()
    training.complete_gradients()
    return training.gradients()


def weighted_backward(case: Case) -> Answer:
    """Gradients of a batch when backward starts from the gradient 2."""
    training = case.open()
    inputs, targets = training.slice(next(iter(batches(case))))
    loss = training.loss(inputs, targets)
    training.strategy.backward(loss, training.made, gradient=torch.full_like(loss, 2.0))
    training.complete_gradients()
    return training.gradients()


def step_with_closure(case: Case) -> Answer:
    """Weights after steps with closures that compute the gradients, or the name of the raised error."""
    training = case.open()
    inner = training.optimizer.optimizer
    for batch in batches(case):
        inputs, targets = training.slice(batch)

        def compute(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            inner.zero_grad()
            loss = training.loss(inputs, targets)
            training.strategy.backward(loss, training.made)
            return loss

        try:
            training.optimizer.step(compute)
        except AccelError as error:
            return {"refused": type(error).__name__ if error.remedy else "an error without a remedy", "weights": {}}
    return {"refused": "", "weights": training.weights()}


def gradients_plain(case: Case) -> Answer:
    """`gradients_of` in plain torch."""
    plain = Plain(case)
    inputs, targets = next(iter(batches(case)))
    loss_of(plain.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.tolist() for name, p in plain.model.named_parameters() if p.grad is not None}


def join_uneven(case: Case) -> Answer:
    """Train when the second process has three batches more than the first."""
    training = case.open()
    with training.strategy.join([training.made]):
        for _ in range(2 + 3 * training.process.rank):
            training.backward(next(iter(batches(case))))
            training.step()
    return {"weights": training.weights()}


def average(case: Case) -> Answer:
    """Parameters after each process set them to its rank and all averaged them."""
    training = case.open()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(float(training.process.rank))
    training.strategy.average_parameters(training.made)
    return {"weights": training.weights(), "mean": (training.process.world_size - 1) / 2}


def clipped_gradients(case: Case) -> Answer:
    """Gradients of one batch after clipping, and the norm before clipping."""
    training = case.open()
    training.backward(next(iter(batches(case))))
    return {"norm": training.clip(), "gradients": training.gradients()}


def clipped_plain(case: Case) -> Answer:
    """`clipped_gradients` in plain torch."""
    plain = Plain(case)
    inputs, targets = next(iter(batches(case)))
    loss_of(plain.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    norm = None
    if case.clip_norm is not None:
        norm = float(nn.utils.clip_grad_norm_(plain.model.parameters(), case.clip_norm, case.norm_type))
    if case.clip_value is not None:
        nn.utils.clip_grad_value_(plain.model.parameters(), case.clip_value)
    gradients = {name: p.grad.tolist() for name, p in plain.model.named_parameters() if p.grad is not None}
    return {"norm": norm, "gradients": gradients}


def overflow(case: Case) -> Answer:
    """Whether a step is made when the last process has an infinite loss, and when no process has one."""
    training = case.open()
    before, stepped, unchanged = training.weights(), [], []
    for bad in (True, False):
        inputs, targets = training.slice(next(iter(batches(case))))
        last = training.process.rank == training.process.world_size - 1
        factor = float("inf") if bad and last else 1.0
        training.gradient.sync_gradients = True
        training.strategy.backward(training.loss(inputs, targets) * factor)
        stepped.append(training.step())
        unchanged.append(training.weights() == before)
    return {"stepped": stepped, "unchanged": unchanged[0]}


# ------------------------------------------------------------------------ checkpoints


SAVED, RESUMED = 7, 9
"""Steps before a save, and after it.

The number before the save is not a multiple of 2 to 6, and both are more than 6. A strategy that does something every
few steps (up to six) has thus done it before the save, is between two times at the save, and does it again later.
"""


def _train_on(training: Training, data: list[Any]) -> list[float]:
    """Losses of batches with noise from each process's random-number generator."""
    return [training.train([(inputs + 0.01 * torch.randn(inputs.shape), targets)])[0][0] for inputs, targets in data]


def save_and_resume(case: Case, folder: str) -> Answer:
    """Save in the middle of a run and train further; then resume with objects that had other values."""
    case = case.but(steps=SAVED + RESUMED, scheduled=True)
    training, data = case.open(), list(batches(case))
    _train_on(training, data[:SAVED])
    training.save(Path(folder), step=SAVED)
    saved, weights = states(training), training.weights()
    expected = _train_on(training, data[SAVED:])
    resumed = case.open(case.make(9))
    for group in resumed.optimizer.param_groups:
        group["lr"] *= 2
    step = resumed.load(Path(folder))
    answer: Answer = {
        "step": step,
        "differs_after_loading": differences(saved, states(resumed)),
        "same_weights": resumed.weights() == weights,
    }
    answer["resumed"], answer["expected"] = _train_on(resumed, data[SAVED:]), expected
    answer["differs_at_the_end"] = differences(states(training), states(resumed))
    answer["rates"] = training.rates[-1], resumed.rates[-1]
    return answer


def states(training: Training) -> Answer:
    """The complete state of a run on this process, as plain data."""
    models = [training.made, *(strategy_model(model) for model, _ in training.others)]
    optimizers = [training.inner, *(as_set_up(optimizer) for _, optimizer in training.others)]
    return {
        "weights": [_plain(_tensors(training, model)) for model in models],
        "optimizers": [_optimizer_state(training, one) for one in optimizers],
        "schedulers": _plain([scheduler.state_dict() for scheduler in training.schedulers]),
        "extra_state": _plain(training.strategy.extra_state(models, optimizers)),
    }


def _tensors(training: Training, model: nn.Module) -> Mapping[str, Tensor]:
    """The parameters and buffers that this process trains."""
    if not training.manifest.capabilities.whole_model:
        # The user's model has old values of what other processes train.
        return training.strategy.state_dict(model)
    bare: nn.Module = training.strategy.unwrap(model)
    return {**dict(bare.named_parameters()), **dict(bare.named_buffers())}


def _optimizer_state(training: Training, optimizer: Any) -> Any:
    """The state of an optimizer as the strategy collects it; nothing where the engine collects when it writes."""
    state = training.strategy.collect(ObjectKind.OPTIMIZER, optimizer)
    return None if state is optimizer else _plain(state)


def _plain(value: Any) -> Any:
    """Tensors as lists; of sharded tensors, this process's shard."""
    if isinstance(value, torch.Tensor):
        return getattr(value, "to_local", lambda: value)().tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The paths of keys at which two nested states differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{path}.{key}".lstrip("."))]
    return [] if repr(one) == repr(other) else [path]


def train_with_saves(case: Case, folder: str, saves: bool) -> Answer:
    """Losses of a run, with or without a save after every step."""
    training, losses = case.open(), []
    for number, batch in enumerate(batches(case)):
        losses += training.train([batch])[0]
        if saves:
            target = Path(folder, str(number))
            target.mkdir(exist_ok=True)
            barrier(training.process.transport, "wait_for_everyone")
            training.save(target)
    return {"losses": losses}


class Layer(nn.Module):
    """A wrapper that the strategy does not know, like that of `torch.compile`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any) -> Any:
        """The model's outputs."""
        return self.inner(*args)


class Around(Transform):
    """Wraps the strategy's model in a `Layer`, unless the strategy compiles models itself."""

    name: ClassVar[str] = "layer"
    stage: ClassVar[Stage] = Stage.COMPILE

    def takes_part(self, manifest: Manifest) -> bool:
        """Whether the backend leaves compiling to transforms."""
        return not manifest.capabilities.own_compile

    def before_wrap(self, manifest: Manifest) -> bool:
        """Always after the strategy."""
        return False

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        """The layer."""
        return Layer(model)


def behind_a_layer(case: Case, folder: str) -> Answer:
    """Accumulate, save and load with a layer around the strategy's model."""
    training = case.but(transforms=(Around(),)).open()
    losses, _ = training.train()
    counted = count_collectives(case.but(transforms=(Around(),)))
    weights = training.weights()
    training.save(Path(folder))
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.load(Path(folder))
    return {
        "losses": losses,
        "is_users_class": isinstance(extract_model_from_parallel(training.model), type(training.user_model)),
        "held": counted["held"],
        "weights": weights,
        "loaded": training.weights() == weights,
    }


def load_from_nothing(case: Case, folder: str) -> list[str]:
    """For each kind of object, the name of the error when it is loaded from an empty folder."""
    training = case.but(scheduled=True).open()
    items = {
        ObjectKind.MODEL: training.made,
        ObjectKind.OPTIMIZER: training.inner,
        ObjectKind.SCHEDULER: as_set_up(training.schedulers[0]),
    }
    return [_error_of(training, kind, items[kind], Path(folder)) for kind in SAVED_KINDS]


def _error_of(training: Training, kind: ObjectKind, item: Any, folder: Path) -> str:
    try:
        training.strategy.load(kind, item, folder, 0)
    except CheckpointError as error:
        return "CheckpointError" if error.remedy else f"CheckpointError without a remedy for the {kind.value}"
    except Exception as error:
        return f"{type(error).__name__} for the {kind.value}"
    return f"nothing was raised for the {kind.value}"


def weights_out_and_in(case: Case) -> Answer:
    """Weights after `state_dict` and `load_weights`, and those of a plain model that loaded them."""
    training = case.open()
    training.train()
    state = {name: value.detach().clone() for name, value in training.strategy.state_dict(training.made).items()}
    other = case.make(4)
    source = {name: value.detach().clone() for name, value in other.state_dict().items()}
    answer: Answer = {"writes": writes(training)}
    training.strategy.load_weights(training.made, source)
    answer["read_back"] = training.weights() == session_lists(source) or not writes(training)
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        expected = other.to(training.process.device)(inputs)
        answer["computes"] = torch.allclose(training.model(inputs), expected, atol=1e-5)
    absent = next(iter(source))
    known = {name: value.detach() for name, value in case.make(6).state_dict().items() if name != absent}
    training.strategy.load_weights(training.made, known, strict=False)
    answer["reads_some"] = training.weights() == session_lists(source | known) or not writes(training)
    if writes(training):
        plain = case.make(5)
        plain.load_state_dict({name: value.cpu() for name, value in state.items()})
        answer["into_plain"] = {n: v.tolist() for n, v in plain.state_dict().items()} == session_lists(state)
    answer["refused"] = _raises(lambda: training.strategy.load_weights(training.made, known))
    return answer


def load_into_a_longer_model(case: Case, folder: str) -> Answer:
    """Whether a checkpoint is refused by a model with a layer more, and what that model has after a load that is not
    strict."""
    training = case.open()
    training.train()
    training.save(Path(folder))
    saved = training.weights()
    training = case.but(model="longer").open()
    own = training.weights()

    def load(strict: bool) -> None:
        training.strategy.load(ObjectKind.MODEL, training.made, Path(folder), 0, strict=strict)

    refused, raised = _raises(lambda: load(True)), _raises(lambda: load(False))
    return {"refused": refused, "loaded": not raised and training.weights() == own | saved}


def _raises(action: Callable[[], None]) -> bool:
    try:
        action()
    except Exception:
        return True
    return False


def session_lists(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A state dict as plain lists."""
    return {name: value.tolist() for name, value in state.items()}


# ---------------------------------------------------------------- what the engine does


def release(case: Case) -> Answer:
    """Whether a released model and optimizer still have references, and whether others can be prepared afterwards."""
    training = case.open()
    training.train()
    strategy = training.strategy
    kept = {"model": weakref.ref(training.user_model), "optimizer": weakref.ref(training.optimizer.optimizer)}
    strategy.release([training.made], [training.inner])
    vars(training).clear()
    gc.collect()
    training = case.open()
    return {name: seen() is not None for name, seen in kept.items()}


def close_at_the_end(case: Case) -> Answer:
    """Whether weights can be read after `close`, and whether a new strategy can follow."""
    training = case.open()
    training.train()
    weights = training.weights()
    training.strategy.close()
    read = training.weights() == weights and isinstance(
        training.strategy.unwrap(training.made), type(training.user_model)
    )
    return {**train(case), "read": read}


def release_another(case: Case) -> Answer:
    """Train after another model and optimizer were released."""
    training, other = case.open(), case.make(2)
    bundle = training.prepare(Bundle.of([other, torch.optim.SGD(other.parameters(), lr=0.3)]))
    training.strategy.release(*([as_set_up(one) for one in kind] for kind in (bundle.models, bundle.optimizers)))
    training.train()
    return {"weights": training.weights()}


def read_steps(case: Case) -> list[Answer]:
    """The shares of this process's batches in the first two optimizer steps of a loader that trains."""
    training = case.open()
    inputs, targets = (torch.cat(tensors) for tensors in zip(*batches(case), strict=True))
    loader = prepare_data_loader(
        DataLoader(TensorDataset(inputs, targets), batch_size=2), order="global", num_processes=1, process_index=0
    )
    shares: list[Answer] = []
    for batch in training.strategy.wrap_loader(loader):
        share = training.strategy.share_of_batch(loader)
        assert share is not None
        shares.append(asdict(share))
        share.accumulated = True
        with nullcontext() if share.last else training.strategy.no_sync(training.made):
            training.strategy.backward(training.loss(*batch) * share.factor, training.made)
        if share.last:
            training.step()
            share.stepped = True
            if sum(one["last"] for one in shares) == 2:
                break
    return shares


def refuse_foreign_settings(case: Case) -> str:
    """The name of the error when the backend is started with settings of another class."""
    try:
        case.but(config=nullcontext()).open()
    except AccelError as error:
        return type(error).__name__ if error.remedy else "an error without a remedy"
    return "nothing was raised"


def compute_dtype(case: Case) -> Answer:
    """The dtype in which the first layer computes, and the dtype of the model's output."""
    training = case.open()
    seen: list[str] = []
    layer: nn.Module = training.strategy.unwrap(training.made)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, output: seen.append(str(output.dtype)))
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    output = training.model(inputs)
    return {"inside": seen[0], "outside": str(output.dtype)}
