"""The catalogues of local steps and of compression are complete, and the backends they were made from are right."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogues import compressing_backends, local_step_backends
from catalogues.faulty_backend import FaultyBackend
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.functional import mse_loss

from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.manifest import ObjectKind
from accel_plugins.precision.base import Precision
from accel_state.current import process
from accel_state.gradient import GradientState
from accel_state.process import PartialState

STEPS = 11

ENTRIES = [
    entry
    for catalogue in (local_step_backends.CATALOGUE, compressing_backends.CATALOGUE)
    for entry in (catalogue.control, *catalogue.values())
]
CONTROLS = {
    "diloco": (local_step_backends.CATALOGUE.control, local_step_backends.DiLoCoConfig(period=4)),
    "signs": (compressing_backends.CATALOGUE.control, compressing_backends.SignConfig(compress=True)),
    "exact": (compressing_backends.CATALOGUE.control, compressing_backends.SignConfig()),
}


@pytest.mark.parametrize(
    ("catalogue", "count"), [(local_step_backends.CATALOGUE, 15), (compressing_backends.CATALOGUE, 25)]
)
def test_faults_have_different_truths_and_classes(catalogue: dict[str, FaultyBackend], count: int) -> None:
    assert len(catalogue) == count
    assert len({entry.truth for entry in catalogue.values()}) == count
    assert len({entry.strategy for entry in catalogue.values()}) == count


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.name))
def test_the_manifest_of_a_backend_leads_to_its_strategy(entry: FaultyBackend) -> None:
    assert pkgutil.resolve_name(entry.target) == entry.manifest
    assert pkgutil.resolve_name(entry.manifest.strategy) is entry.strategy


# ---------------------------------------------------------------- the algorithms in plain torch


def model_of(seed: int) -> Module:
    torch.manual_seed(seed)
    return Sequential(Linear(4, 3), Tanh(), Linear(3, 1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 1, generator=generator)


def optimizer_of(model: Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def local_steps_in_one_process(period: int = 4, rate: float = 0.7, momentum: float = 0.9) -> list[list[Tensor]]:
    """The weights of both processes after all steps."""
    models = [model_of(0), model_of(0)]
    optimizers = [optimizer_of(model) for model in models]
    outer_model = model_of(0)
    outer = torch.optim.SGD(outer_model.parameters(), lr=rate, momentum=momentum, nesterov=True)
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = batch(step, rank)
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % period == 0:
            for anchor, *local in zip(outer_model.parameters(), *(model.parameters() for model in models), strict=True):
                anchor.grad = anchor.detach() - torch.stack([one.detach() for one in local]).mean(0)
            outer.step()
            for model in models:
                model.load_state_dict(outer_model.state_dict())
    return [[one.detach() for one in model.parameters()] for model in models]


def compressed_in_one_process(compress: bool) -> list[list[Tensor]]:
    """The weights after all steps, which are those of both processes."""
    model = model_of(0)
    optimizer = optimizer_of(model)
    left = [[torch.zeros_like(one) for one in model.parameters()] for _ in range(2)]
    for step in range(STEPS):
        sent: list[list[Tensor]] = []
        for rank in range(2):
            inputs, targets = batch(step, rank)
            gradients = torch.autograd.grad(mse_loss(model(inputs), targets), list(model.parameters()))
            wanted = [one + rest for one, rest in zip(gradients, left[rank], strict=True)]
            sent.append([one.sign() * one.abs().mean() for one in wanted] if compress else wanted)
            left[rank] = [one - message for one, message in zip(wanted, sent[rank], strict=True)]
        for parameter, *messages in zip(model.parameters(), *sent, strict=True):
            parameter.grad = torch.stack(messages).mean(0)
        optimizer.step()
    return [[one.detach() for one in model.parameters()]] * 2


PLAIN: dict[str, Callable[[], list[list[Tensor]]]] = {
    "diloco": local_steps_in_one_process,
    "signs": lambda: compressed_in_one_process(True),
    "exact": lambda: compressed_in_one_process(False),
}


# ---------------------------------------------------------------- the same by the backends


def started(name: str, seed: int) -> tuple[Any, Any, Any]:
    entry, config = CONTROLS[name]
    PartialState(cpu=True)
    strategy = entry.strategy(Context(process(), GradientState(), Precision(), manifest=entry.manifest), config)
    model = model_of(seed)
    bundle = strategy.setup(Bundle.of([model, optimizer_of(model)]))
    return strategy, bundle.models[0], bundle.optimizers[0]


def train(strategy: Any, model: Any, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        inputs, targets = batch(step, strategy.context.process.rank)
        strategy.backward(mse_loss(model(inputs), targets), model)
        strategy.finalize_gradients(optimizer)
        strategy.finalize_gradients(optimizer)
        strategy.step(optimizer)
        strategy.after_step(model, optimizer)
        optimizer.zero_grad()
    return [one.detach().clone() for one in model.parameters()]


def trained(name: str) -> list[Tensor]:
    return train(*started(name, PartialState(cpu=True).process_index), range(STEPS))


def resumed(name: str, folder: str) -> list[Tensor]:
    """The weights after all steps, with a stop after the fifth."""
    strategy, model, optimizer = started(name, 0)
    train(strategy, model, optimizer, range(5))
    kinds = ((ObjectKind.MODEL, model), (ObjectKind.OPTIMIZER, optimizer))
    states = [(kind, strategy.collect(kind, item)) for kind, item in kinds]
    extra = f"{folder}/extra_{strategy.context.process.rank}.pt"
    torch.save(strategy.extra_state([model], [optimizer]), extra)
    if strategy.capabilities.collective_save or strategy.context.process.rank == 0:
        for kind, state in states:
            strategy.save(kind, state, Path(folder), 0)
    strategy.context.process.transport.barrier()
    strategy, model, optimizer = started(name, 1)
    for kind, item in ((ObjectKind.MODEL, model), (ObjectKind.OPTIMIZER, optimizer)):
        strategy.load(kind, item, Path(folder), 0)
    strategy.load_extra_state(torch.load(extra), [model], [optimizer])
    return train(strategy, model, optimizer, range(5, STEPS))


@pytest.mark.parametrize("name", CONTROLS)
def test_a_correct_backend_computes_what_the_algorithm_computes_in_one_process(two: Any, name: str) -> None:
    for weights, expected in zip(two.run(trained, name), PLAIN[name](), strict=True):
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_correct_backend_resumes_exactly(two: Any, tmp_path: Path, name: str) -> None:
    for weights, expected in zip(two.run(resumed, name, str(tmp_path)), two.run(trained, name), strict=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
