"""The catalogues of planted faults are complete, every entry can run, and what they were made from works."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogues import broken_backends, failures, parallelism_bugs, resume_omissions
from torch import Tensor

from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.manifest import Manifest, ObjectKind
from accel_plugins.precision.base import Precision
from accel_state.current import process
from accel_state.gradient import GradientState
from accel_state.process import PartialState
from accel_torch import Accelerator

# ---------------------------------------------------------------- broken backends


def test_eighteen_backends_are_broken_in_different_ways() -> None:
    assert len(broken_backends.CATALOGUE) == 18
    assert len({entry.truth for entry in broken_backends.CATALOGUE.values()}) == 18
    assert len({entry.strategy for entry in broken_backends.CATALOGUE.values()}) == 18


@pytest.mark.parametrize("name", [*broken_backends.CONTROLS, *broken_backends.CATALOGUE])
def test_the_manifest_of_a_backend_leads_to_its_strategy(name: str) -> None:
    entry = (broken_backends.CONTROLS | broken_backends.CATALOGUE)[name]
    manifest = pkgutil.resolve_name(entry.target)
    assert isinstance(manifest, Manifest)
    assert pkgutil.resolve_name(manifest.strategy) is entry.strategy


def started(name: str) -> tuple[Any, Any, Any]:
    """A strategy, and a model and an optimizer as it set them up, from a seed of each process's own."""
    state = PartialState(cpu=True)
    entry = (broken_backends.CONTROLS | broken_backends.CATALOGUE)[name]
    strategy = entry.strategy(Context(process(), GradientState(), Precision(), manifest=entry.manifest))
    torch.manual_seed(state.process_index)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    bundle = strategy.setup(Bundle.of([model, optimizer]))
    return strategy, bundle.models[0], bundle.optimizers[0]


def stepped(strategy: Any, model: Any, optimizer: Any, step: int) -> None:
    """One step of two passes, on inputs of each process's own."""
    process_count, rank = strategy.context.process.world_size, strategy.context.process.rank
    inputs = torch.randn(process_count, 2, 5, 4, generator=torch.Generator().manual_seed(step))[rank]
    with strategy.no_sync(model):
        strategy.backward(model(inputs[0]).square().mean() / 2)
    strategy.backward(model(inputs[1]).square().mean() / 2)
    strategy.finalize_gradients(optimizer)
    strategy.step(optimizer)
    optimizer.zero_grad()


def weights(strategy: Any, model: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in strategy.unwrap(model).parameters()]


def trained_weights(name: str) -> list[Tensor]:
    strategy, model, optimizer = started(name)
    model.eval()
    for step in range(3):
        stepped(strategy, model, optimizer, step)
    return weights(strategy, model)


def alone() -> list[Tensor]:
    """Weights of one process that trains on the inputs of two."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        inputs = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(step))
        model(inputs.view(-1, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_the_averaging_original_trains_like_one_process(two: Any) -> None:
    expected = alone()
    for found in two.run(trained_weights, "averaging"):
        torch.testing.assert_close(found, expected)


def test_the_original_of_local_steps_takes_the_mean_after_each_period(two: Any) -> None:
    first, second = two.run(trained_weights, "local_steps")
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def resumed_weights(name: str, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after eight steps in one go, and after a stop at step five."""
    strategy, model, optimizer = started(name)
    parts = ((ObjectKind.MODEL, model), (ObjectKind.OPTIMIZER, optimizer))
    for step in range(5):
        stepped(strategy, model, optimizer, step)
    for kind, item in parts:
        state = strategy.collect(kind, item)
        if strategy.capabilities.collective_save or strategy.context.process.rank == 0:
            strategy.save(kind, state, Path(folder), 0)
    strategy.context.process.transport.barrier()
    for step in range(5, 8):
        stepped(strategy, model, optimizer, step)
    straight = weights(strategy, model)
    strategy, model, optimizer = started(name)
    for kind, item in ((ObjectKind.MODEL, model), (ObjectKind.OPTIMIZER, optimizer)):
        strategy.load(kind, item, Path(folder), 0)
    for step in range(5, 8):
        stepped(strategy, model, optimizer, step)
    return straight, weights(strategy, model)


@pytest.mark.parametrize("name", broken_backends.CONTROLS)
def test_the_originals_resume_exactly(two: Any, tmp_path: Path, name: str) -> None:
    for straight, resumed in two.run(resumed_weights, name, str(tmp_path)):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


# ---------------------------------------------------------------- omissions of checkpoints


def test_twenty_omissions_have_different_names_and_truths() -> None:
    assert len(resume_omissions.CATALOGUE) == 20
    assert len({entry.truth for entry in resume_omissions.CATALOGUE.values()}) == 20


@pytest.mark.parametrize("omission", resume_omissions.CATALOGUE.values(), ids=resume_omissions.CATALOGUE)
def test_a_script_with_an_omission_differs_from_its_control_in_the_switch(omission: resume_omissions.Omission) -> None:
    planted, control = omission.script(omit=True), omission.script(omit=False)
    compile(planted, omission.name, "exec")
    assert planted.count("OMIT") >= 2, "the switch is used"
    changed = [pair for pair in zip(planted.splitlines(), control.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed == [("OMIT = True", "OMIT = False")]


# ---------------------------------------------------------------- failures of launched runs


def test_forty_failures_have_different_names_and_scripts() -> None:
    assert len(failures.CATALOGUE) == 40
    assert len({failure.script for failure in failures.CATALOGUE.values()}) == 40


@pytest.mark.parametrize("failure", failures.CATALOGUE.values(), ids=failures.CATALOGUE)
def test_the_truth_about_a_failure_is_consistent(failure: failures.Failure) -> None:
    compile(failure.script, failure.name, "exec")
    finishes = failure.action is failures.Action.FINISH
    assert failure.culprit in ({None} if finishes else {None, 0, 1})
    assert bool(failure.samples) == (failure.action is failures.Action.STOP_AND_NAME_SAMPLES)
    assert failure.starts >= (2 if failure.action is failures.Action.RESTART else 1)


# ---------------------------------------------------------------- faults of parallel training


def test_twenty_faults_of_parallel_training_have_different_truths() -> None:
    assert len(parallelism_bugs.CATALOGUE) == 20
    assert len({bug.truth for bug in parallelism_bugs.CATALOGUE.values()}) == 20


@pytest.mark.parametrize("bug", parallelism_bugs.CATALOGUE.values(), ids=parallelism_bugs.CATALOGUE)
def test_a_fault_names_what_the_model_has_and_leaves_nothing_behind(bug: parallelism_bugs.ParallelismBug) -> None:
    model = parallelism_bugs.TinyModel()
    known = {*dict(model.named_modules()), *dict(model.named_buffers())}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert bug.plan in parallelism_bugs.PLANS
    assert set(bug.first) <= known
    before = (Accelerator.prepare, Accelerator.backward, Accelerator.clip_grad_norm_, parallelism_bugs.tokens_of_each)
    with bug.planted():
        pass
    after = (Accelerator.prepare, Accelerator.backward, Accelerator.clip_grad_norm_, parallelism_bugs.tokens_of_each)
    assert after == before


@pytest.fixture(scope="module")
def trained_alone(one: Any) -> parallelism_bugs.Trace:
    trace: parallelism_bugs.Trace = one.run(parallelism_bugs.train, "one")[0]
    return trace


@pytest.mark.parametrize("plan", parallelism_bugs.PLANS[1:])
def test_without_a_fault_a_plan_computes_what_one_process_computes(
    two: Any, trained_alone: parallelism_bugs.Trace, plan: str
) -> None:
    for trace in two.run(parallelism_bugs.train, plan):
        torch.testing.assert_close(trace.losses, trained_alone.losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trace.weights, trained_alone.weights, rtol=1e-4, atol=1e-5)
