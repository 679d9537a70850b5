"""A short training loop that uses every part of a strategy, and the same loop in plain torch for comparison.

Functions here run inside the processes of the kit. `strategy.shards()` divides each global batch into equal shards, so
every strategy must produce the results of one process with the whole batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accel_plugins import order
from accel_plugins.bundle import Bundle
from accel_plugins.checkpoint.state import load_folder, save_folder
from accel_plugins.context import Context
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import Manifest, ObjectKind
from accel_plugins.precision.config import GradScalerKwargs
from accel_plugins.precision.select import choose
from accel_plugins.prepared import PreparedObjects, as_set_up
from accel_plugins.resolve import build
from accel_plugins.strategy import Strategy
from accel_plugins.transform import Transform
from accel_plugins.wrapped.optimizer import AcceleratedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state import current
from accel_state.current import Process
from accel_state.errors import CheckpointError
from accel_state.gradient import GradientAccumulationPlugin, GradientState
from accel_state.mesh import ParallelismConfig
from accel_state.process import PartialState
from accel_state.protocol.call import barrier

__all__ = (
    "HALF",
    "MODELS",
    "QUESTIONS",
    "Branching",
    "CUDATraining",
    "Case",
    "Convex",
    "FakeStrategy",
    "Frozen",
    "Longer",
    "Plain",
    "SimulatedTraining",
    "Small",
    "Tied",
    "Training",
    "batches",
    "first_half",
    "loss_of",
    "make_model",
    "make_optimizer",
    "make_scheduler",
    "near",
    "second_half",
)

WIDTH, CLASSES, BATCH = 6, 3, 24
"""Sizes of the model, and samples of a global batch; divisible by 1, 2, 3 and 4 processes and 2 and 3 micro-batches."""


@dataclass(frozen=True)
class Case:
    """One training run.

    Args:
        manifest: the manifest of the backend.
        config: the settings of the backend; None: read from the environment.
        precision: name of the precision.
        steps: optimizer steps; by default a number that no period of 2 to 6 divides, so a strategy that does something
            every few steps is between two times at the end.
        accumulation: micro-batches per step.
        no_sync: whether all micro-batches except the last run under `no_sync`.
        clip_norm: maximum total norm of the gradients at every step, or None.
        norm_type: the order of the norm, such as 2.0.
        clip_value: maximum absolute value of gradients at every step, or None.
        adam: whether to train with Adam instead of SGD with momentum.
        muon: whether to train the hidden matrices with Muon, which needs them whole, and nothing else.
        scheduled: whether a learning-rate scheduler is prepared and steps after the optimizer.
        model: key of the model in `MODELS`, or "module:class" of a model that a suite brings.
        grouped: whether the optimizer has two groups of parameters with different options.
        own_start: whether each process creates its model from a different seed.
        beside: whether a second model with an optimizer of its own trains beside, on the same batches.
        tail: number of samples of the last global batch.
        training: the `Training` that runs the training, as "module:class".
        parallelism_config: the axes of the run, or None.
        transforms: changes of the model, in any order.
    """

    manifest: Manifest
    config: Any = None
    precision: str = "no"
    steps: int = 7
    accumulation: int = 1
    no_sync: bool = True
    clip_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    adam: bool = False
    muon: bool = False
    scheduled: bool = False
    model: str = "usual"
    grouped: bool = False
    own_start: bool = False
    beside: bool = False
    tail: int = BATCH
    training: str = "accel_testing.backends.reference_loop:Training"
    parallelism_config: ParallelismConfig | None = None
    transforms: tuple[Transform, ...] = ()

    def open(self, model: nn.Module | None = None) -> Training:
        """Start the run, with `model` or the default one."""
        module, _, name = self.training.partition(":")
        training: Training = getattr(importlib.import_module(module), name)(self, model)
        return training

    def make(self, seed: int = 0) -> nn.Module:
        """Create the user's model of this run."""
        if ":" not in self.model:
            return MODELS[self.model](seed)
        module, _, name = self.model.partition(":")
        model: nn.Module = getattr(importlib.import_module(module), name)(seed)
        return model

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a prepared model as a script computes it: mean cross entropy."""
        if self.manifest.capabilities.loss_in_forward:
            loss: Tensor = model(inputs, targets)
            return loss
        return loss_of(model, inputs, targets)

    def but(self, **changes: Any) -> Case:
        """A copy of the case with other values of some fields."""
        return replace(self, **changes)


class Small(nn.Module):
    """A model with layers of different shapes and a buffer that forward uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, 10, bias=False), nn.Tanh())
        self.head = nn.Linear(10, CLASSES)
        self.register_buffer("factor", torch.tensor(1.5 + seed / 8))
        # Backends may treat small parameters differently.
        self.stretch = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            for parameter in (*self.body.parameters(), *self.head.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (samples, CLASSES)."""
        logits: Tensor = self.head(self.body(inputs) * self.factor * self.stretch)
        return logits


class Frozen(Small):
    """The model with a frozen layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.body.requires_grad_(False)


class Tied(Small):
    """The model with a layer that is used twice, under two names."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.again = nn.Linear(10, 10, bias=False)
        used_twice: Any = self.body[2]
        self.again.weight = used_twice.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (samples, CLASSES)."""
        logits: Tensor = self.head(self.again(self.body(inputs)) * self.factor * self.stretch)
        return logits


class Longer(Small):
    """The model with a layer more, which its forward does not use."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.more = nn.Linear(2, 2)
        nn.init.constant_(self.more.weight, seed)
        nn.init.constant_(self.more.bias, seed)


class Branching(Small):
    """The model with a second head; a process chooses the one that its forward uses.

    Attributes:
        branch: 0 or 1.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.other_head = nn.Linear(10, CLASSES)
        nn.init.constant_(self.other_head.weight, 0.1)
        nn.init.constant_(self.other_head.bias, 0.1)
        self.branch = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (samples, CLASSES)."""
        head = self.other_head if self.branch else self.head
        logits: Tensor = head(self.body(inputs) * self.factor * self.stretch)
        return logits


class Convex(nn.Module):
    """Softmax regression, whose loss is convex."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.constant_(self.head.weight, 0.1 * (seed + 1))
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (samples, CLASSES)."""
        logits: Tensor = self.head(inputs)
        return logits


MODELS: Final[dict[str, Callable[[int], nn.Module]]] = {
    "usual": Small,
    "frozen": Frozen,
    "tied": Tied,
    "longer": Longer,
    "branching": Branching,
    "convex": Convex,
}
"""Models by the name that a `Case` contains."""


def make_model(seed: int = 0) -> Small:
    """The model that every process starts with."""
    return Small(seed)


def make_optimizer(case: Case, model: nn.Module) -> Optimizer:
    """Create the optimizer of a case."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.adam:
        return torch.optim.Adam(trained, lr=0.05)
    if case.muon:
        # Gradients of the head have a singular value of zero, which Muon would enlarge with its rounding errors.
        hidden = [one for one in model.parameters() if one.ndim == 2 and len(one) != CLASSES]
        return torch.optim.Muon(hidden, lr=0.05)
    if case.grouped:
        weights = [parameter for parameter in trained if parameter.ndim > 1]
        others = [parameter for parameter in trained if parameter.ndim <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.3, momentum=0.9)
    return torch.optim.SGD(trained, lr=0.3, momentum=0.9)


def make_scheduler(optimizer: Optimizer) -> Any:
    """The learning-rate scheduler of a case, if it has one."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)


def batches(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) of each global batch; the last one has `case.tail` samples."""
    generator = torch.Generator().manual_seed(1234)
    for step in range(case.steps):
        size = case.tail if step == case.steps - 1 else BATCH
        inputs = torch.randn(size, WIDTH, generator=generator)
        yield inputs, torch.randint(CLASSES, (size,), generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a model outside of a run: mean cross entropy."""
    return nn.functional.cross_entropy(model(inputs), targets)


class Plain:
    """The training of a case in plain torch, on full batches.

    Attributes:
        model: the model that `run` trains.
        losses: the loss of each step.
        norms: total gradient norm of each step before clipping, if the case clips.
        rates: learning rate after each step.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.make()
        self.optimizer = make_optimizer(case, self.model)
        self.scheduler = make_scheduler(self.optimizer) if case.scheduled else None
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, data: Iterable[tuple[Tensor, Tensor]] | None = None) -> Plain:
        """Train on global batches; None: those of the case."""
        for inputs, targets in batches(self.case) if data is None else data:
            loss = loss_of(self.model, inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.case.clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip_norm, self.case.norm_type)
                self.norms.append(float(norm))
            if self.case.clip_value is not None:
                nn.utils.clip_grad_value_(self.model.parameters(), self.case.clip_value)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.losses.append(loss.item())
        return self

    def weights(self) -> dict[str, list[Any]]:
        """State dict as plain lists."""
        return {name: value.tolist() for name, value in self.model.state_dict().items()}


class Training:
    """A strategy with prepared objects, prepared in the same way as by an Accelerator.

    Every process has a different random seed, as in a script that sets none.

    Attributes:
        strategy, manifest, gradient: the strategy, its manifest and the gradient state of the case.
        model, optimizer, schedulers: the prepared objects.
        user_model: the user's model before `prepare`.
        rates: learning rate after each step of `train`.
        others: further models with their optimizers, which `train` trains beside on the same batches.
    """

    process: Process
    gradient: GradientState
    strategy: Strategy

    def __init__(
        self,
        case: Case,
        model: nn.Module | None = None,
        init_scale: float = 256.0,
        handlers: Sequence[Any] = (),
    ) -> None:
        self.case, self.manifest = case, case.manifest
        self.start()
        self.make_strategy([GradScalerKwargs(init_scale=init_scale), *handlers])
        torch.manual_seed(1000 + self.process.rank)
        self.user_model = case.make(self.process.rank if case.own_start else 0) if model is None else model
        optimizer = make_optimizer(case, self.user_model)
        scheduled = [make_scheduler(optimizer)] if case.scheduled else []
        prepared = self.prepare(Bundle.of([self.user_model, optimizer, *scheduled]))
        self.model: nn.Module = prepared.models[0]
        self.optimizer: Any = prepared.optimizers[0]
        self.schedulers: list[Any] = prepared.schedulers
        self.rates: list[float] = []
        self.others: list[tuple[nn.Module, Any]] = []
        if case.beside:
            self.add(case.make(2))

    def add(self, model: nn.Module) -> tuple[nn.Module, Any]:
        """Prepare a further model with an optimizer of its own, and train it beside from now on."""
        bundle = self.prepare(Bundle.of([model, make_optimizer(self.case, model)]))
        self.others.append((bundle.models[0], bundle.optimizers[0]))
        return self.others[-1]

    def prepare_to_evaluate(self, model: nn.Module) -> nn.Module:
        """Prepare a model that is not trained, as `prepare` does where the backend takes a model alone."""
        trains = self.manifest.together <= {ObjectKind.MODEL}
        bundle = Bundle.of([model])
        for step in order.steps(self.manifest, self.strategy, self.case.transforms, trains=trains):
            bundle = step.run(bundle)
        evaluated: nn.Module = bundle.models[0]
        return evaluated

    @property
    def wrapped(self) -> nn.Module:
        """The strategy's model, inside the layers that transforms added."""
        return strategy_model(self.model)

    @property
    def inner(self) -> Any:
        """The optimizer that the strategy set up."""
        return as_set_up(self.optimizer)

    def start(self) -> None:
        """Create the state of the process, on the CPU unless a subclass uses another device."""
        PartialState(cpu=True)

    def make_strategy(self, handlers: Sequence[Any]) -> None:
        """Create the strategy of the case."""
        case, self.process = self.case, current.process()
        self.gradient = GradientState.of(GradientAccumulationPlugin(num_steps=case.accumulation))
        precision = choose(case.precision, self.process.family, handlers)
        mesh = (
            None
            if case.parallelism_config is None
            else case.parallelism_config.get_device_mesh(self.process.device.type)
        )
        self.strategy = build(case.manifest, case.config, Context(self.process, self.gradient, precision, mesh))

    def prepare(self, bundle: Bundle) -> Bundle:
        """The steps of `prepare`, in order."""
        transforms = self.case.transforms
        order.check_bundle(self.manifest, self.strategy, transforms, bundle)
        for step in order.steps(self.manifest, self.strategy, transforms):
            bundle = step.run(bundle)
        bundle.optimizers = [
            optimizer
            if isinstance(optimizer, AcceleratedOptimizer)
            else AcceleratedOptimizer(optimizer, gradient=self.gradient, strategy=self.strategy)
            for optimizer in bundle.optimizers
        ]
        bundle.schedulers = [
            scheduler
            if isinstance(scheduler, AcceleratedScheduler)
            else AcceleratedScheduler(scheduler, bundle.optimizers, gradient=self.gradient, processes=1)
            for scheduler in bundle.schedulers
        ]
        return bundle

    def loader(self, data: Sequence[tuple[Tensor, Tensor]]) -> Iterable[Any]:
        """A prepared loader over this process's shards of the global batches."""
        parts: Any = [self.slice(batch) for batch in data]
        return self.strategy.wrap_loader(DataLoader(parts, batch_size=None))

    def save(self, folder: Path, step: int = 0) -> None:
        """Write a checkpoint."""
        save_folder(folder, self._contents(), self.strategy, self.process, step=step)
        barrier(self.process.transport, "wait_for_everyone")

    def load(self, folder: Path) -> int:
        """Load a checkpoint; return the step at which it was written."""
        return load_folder(folder, self._contents(), self.strategy, self.process)

    def _contents(self) -> PreparedObjects:
        models = [self.model, *(model for model, _ in self.others)]
        optimizers = [self.optimizer, *(optimizer for _, optimizer in self.others)]
        return PreparedObjects(models, optimizers, self.schedulers, scaler=self.strategy.context.precision)

    def slice(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This process's shard of a global batch, on its device."""
        shards = self.strategy.shards()
        size = len(batch[0]) // shards.count
        mine = slice(shards.index * size, (shards.index + 1) * size)
        device = self.process.device
        return batch[0][mine].to(device), batch[1][mine].to(device)

    def micro_batches(self, batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """This process's shard, divided into micro-batches."""
        inputs, targets = self.slice(batch)
        size = len(inputs) // self.case.accumulation
        return list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))

    def backward(self, batch: tuple[Tensor, Tensor]) -> float:
        """Run forward and backward of a global batch; return its mean loss on this process."""
        parts = self.micro_batches(batch)
        divisor = 1 if self.manifest.capabilities.own_accumulation else len(parts)
        total = 0.0
        for number, (inputs, targets) in enumerate(parts, start=1):
            self.gradient.sync_gradients = number == len(parts)
            if self.gradient.sync_gradients or not self.case.no_sync:
                total += self._backward_once(inputs, targets, divisor)
            else:
                with self.strategy.no_sync(self.wrapped):
                    total += self._backward_once(inputs, targets, divisor)
        return total / len(parts)

    def _backward_once(self, inputs: Tensor, targets: Tensor, divisor: int) -> float:
        loss = self.loss(inputs, targets)
        self.strategy.backward(loss / divisor, self.wrapped)
        return loss.item()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of the prepared model on samples of this process."""
        return self.case.loss(self.model, inputs, targets)

    def complete_gradients(self) -> None:
        """Complete and unscale the gradients, as needed before clipping or reading them."""
        self.strategy.finalize_gradients(self.inner)
        if not self.manifest.capabilities.own_precision:
            self.strategy.context.precision.unscale(self.inner)

    def clip(self) -> float | None:
        """Clip as the case specifies; return the norm before clipping, if the case clips by norm."""
        norm: Tensor | None = None
        if self.case.clip_norm is not None:
            self.complete_gradients()
            parameters = list(self.model.parameters())
            norm = self.strategy.clip_norm(parameters, self.case.clip_norm, self.case.norm_type)
        if self.case.clip_value is not None:
            self.complete_gradients()
            self.strategy.clip_value(list(self.model.parameters()), self.case.clip_value)
        return None if norm is None else float(_full(norm))

    def step(self) -> bool:
        """Step and reset the gradients; return whether the step was not skipped."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return not self.optimizer.step_was_skipped

    def train(self, data: Sequence[tuple[Tensor, Tensor]] | None = None) -> tuple[list[float], list[float | None]]:
        """Train; return the mean loss over all processes and the norm before clipping of each step."""
        losses, norms = [], []
        for batch in batches(self.case) if data is None else data:
            loss = self.backward(batch)
            norms.append(self.clip())
            self.step()
            for scheduler in self.schedulers:
                scheduler.step()
            for other in self.others:
                self._train_beside(*other, batch)
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            losses.append(self.mean(loss))
        return losses, norms

    def _train_beside(self, model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
        self.strategy.backward(self.case.loss(model, *self.slice(batch)), strategy_model(model))
        optimizer.step()
        optimizer.zero_grad()

    def mean(self, value: float) -> float:
        """The mean of a number over all processes."""
        total = torch.tensor(value, device=self.process.transport.device, dtype=torch.float64)
        self.process.transport.all_reduce(total).wait()
        return total.item() / self.process.world_size

    def weights(self, model: nn.Module | None = None) -> dict[str, list[Any]]:
        """Full weights of a prepared model as plain lists, or of the first; empty if this process has none to write."""
        state = self.strategy.state_dict(self.wrapped if model is None else strategy_model(model))
        return {name: value.tolist() for name, value in state.items()} if self.strategy.writes_weights() else {}

    def gradients(self) -> dict[str, list[Any]]:
        """Full gradients as plain lists, by their names in the user's model."""
        return {name: gradient.tolist() for name, gradient in self.strategy.gradients(self.wrapped).items()}


def _full(tensor: Tensor) -> Tensor:
    """The full tensor of one that may be sharded over processes."""
    complete: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return complete.detach()


# ---------------------------------------------------------------------- on other devices


class CUDATraining(Training):
    """Each process uses a different GPU."""

    def start(self) -> None:
        PartialState()


class SimulatedTraining(Training):
    """Each process uses the simulated device, which raises for calls that mix its tensors with CPU tensors."""

    def start(self) -> None:
        # The import registers the device with torch, which counts devices at the first backward pass.
        import accel_testing.simulated_device  # noqa: F401
        from accel_testing.simulated_device import MODULE

        MODULE.plug_in(1, 2**30)
        PartialState()


# ---------------------------------------------------------------------- a run in two halves

HALF = 2
"""Batches before the checkpoint."""


def first_half(case: Case, folder: str) -> dict[str, Any]:
    """Train, write a checkpoint, and train further; return the saved weights and the losses after the checkpoint."""
    training = Training(case)
    training.train(list(batches(case))[:HALF])
    save_folder(folder, PreparedObjects([training.model], [training.optimizer]), training.strategy, training.process)
    barrier(training.process.transport, "wait_for_everyone")
    weights = training.weights()
    return {"weights": weights, "losses": training.train(list(batches(case))[HALF:])[0]}


def second_half(case: Case, folder: str) -> dict[str, Any]:
    """Resume from the checkpoint with a model of other weights; return the same, or the error that loading raised."""
    training = Training(case, make_model(9))
    contents = PreparedObjects([training.model], [training.optimizer])
    try:
        load_folder(folder, contents, training.strategy, training.process, allow_missing={"random_states"})
    except CheckpointError as error:
        return {"error": str(error)}
    return {"weights": training.weights(), "losses": training.train(list(batches(case))[HALF:])[0]}


# ---------------------------------------------------------------------- what tests compare with


def near(expected: Any, rel: float = 2e-5, abs: float = 2e-6) -> Any:  # noqa: A002 - the words of pytest.approx
    """An object that equals every value near `expected`: numbers, and nested lists and dicts of them.

    Example:
        >>> {"losses": [[1.0], [2.0]]} == near({"losses": [[1.000001], [2.0]]})
        True
    """
    import pytest

    if isinstance(expected, dict):
        return {name: near(value, rel, abs) for name, value in expected.items()}
    if isinstance(expected, list) and any(isinstance(value, (list, dict)) for value in expected):
        return [near(value, rel, abs) for value in expected]
    return pytest.approx(expected, rel=rel, abs=abs)


QUESTIONS: Final = frozenset(
    name for name, value in vars(Strategy).items() if callable(value) and not name.startswith("_")
)
"""The names of a strategy's public methods."""


class FakeStrategy(Strategy):
    """A strategy with the behaviour of one process, which records the calls of its methods.

    Attributes:
        calls: names of the called methods, in order.
    """

    def __init__(self, context: Any, config: Any = None) -> None:
        self.calls: list[str] = []
        super().__init__(context, config)

    def __getattribute__(self, name: str) -> Any:
        if name in QUESTIONS:
            self.calls.append(name)
        return super().__getattribute__(name)
