"""Unusual loops with a guard of steps, what it writes, and what it refuses."""

from __future__ import annotations

import gc
import json
import math
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_state.errors import Conflict, NotOffered, NotReady, SettingError
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    NonFiniteStep,
    ParallelismConfig,
    SpikeStep,
    StepGuard,
    TorchTensorParallelPlugin,
)
from accel_torch.step_guard.history import History

pytestmark = pytest.mark.usefixtures("fresh_state")


def prepared(guard: StepGuard, optimizer: Any = None, **options: Any) -> tuple[Accelerator, Any, Any]:
    """An Accelerator with a small model and its optimizer."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[guard], **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    stepper = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer(model.parameters())
    return accelerator, *accelerator.prepare(model, stepper)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


SKIP = StepGuard(nonfinite="skip")
BAD = torch.full((2, 4), math.nan)
GOOD = torch.ones(2, 4)


def test_a_loss_that_is_not_a_scalar() -> None:
    accelerator, model, optimizer = prepared(SKIP)
    for inputs in (GOOD, BAD, GOOD):
        accelerator.backward(model(inputs), gradient=torch.ones(2, 1))
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.guard is not None
    assert [event.step for event in accelerator.guard.events] == [2]
    assert all(map(math.isfinite, weights(model)))


def test_a_clip_inside_a_window_and_by_value() -> None:
    """A norm inside a window is not that of the step, and clamping hides infinite gradients."""
    accelerator, model, optimizer = prepared(SKIP, gradient_accumulation_steps=2)
    for step in range(3):
        for micro_batch in range(2):
            with accelerator.accumulate(model):
                loss = model(GOOD).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                if step == 1 and micro_batch == 1:
                    next(model.parameters()).grad[0, 0] = math.inf
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.guard is not None
    assert [(event.step, event.quantity, event.cause) for event in accelerator.guard.events] == [
        (2, "norm", "numerics")
    ]


def test_a_clip_of_some_parameters_does_not_hide_the_others() -> None:
    accelerator, model, optimizer = prepared(SKIP)
    accelerator.backward(model(GOOD).square().mean())
    next(model.parameters()).grad[:] = math.nan
    accelerator.clip_grad_norm_(list(model.parameters())[2:], 1.0)
    before = weights(model)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert weights(model) == before


def test_a_clip_does_not_hide_a_later_backward_pass() -> None:
    accelerator, model, optimizer = prepared(SKIP)
    accelerator.backward(model(GOOD).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.backward(model(BAD).square().mean())
    before = weights(model)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert weights(model) == before


def test_parameters_outside_a_clip_count_as_soon_as_they_have_gradients() -> None:
    accelerator, model, optimizer = prepared(SKIP)
    first, *others = model.parameters()
    for step in range(2):
        accelerator.backward(model(GOOD).square().mean())
        first.grad = None if step == 0 else torch.full_like(first, math.nan)
        accelerator.clip_grad_norm_(others, 1.0)
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
        optimizer.zero_grad()


@pytest.mark.parametrize("factor", [0.1, 0.9989, 0.9999, 1.0, 1.0001, 1.0011, 3.0])
def test_gradients_are_clipped_as_without_a_guard(factor: float) -> None:
    gradients = []
    for guard in (SKIP, None):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[guard] if guard else [])
        torch.manual_seed(0)
        plain = nn.Linear(4, 3)
        model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        accelerator.backward(model(GOOD).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf).item()
        returned = accelerator.clip_grad_norm_(model.parameters(), norm / factor)
        gradients.append([returned, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_closures_of_lbfgs(search: str | None) -> None:
    accelerator, model, optimizer = prepared(
        SKIP, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, line_search_fn=search)
    )
    for inputs in (GOOD, BAD, GOOD):
        before = weights(model)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
        assert optimizer.step_was_skipped == (inputs is BAD)
        assert inputs is GOOD or weights(model) == before
    assert all(map(math.isfinite, weights(model)))


def test_a_compiled_model_and_the_first_bad_module() -> None:
    class Root(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (inputs.square().sum(1, keepdim=True).neg() - 1).sqrt()

    accelerator = Accelerator(cpu=True, kwargs_handlers=[StepGuard(locate=True)], dynamo_backend="eager")
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=1.0), nn.Sequential(nn.Linear(4, 4), Root()))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.randn(8, 4)).sum()
    accelerator.backward(loss)
    buffers = [buffer.clone() for buffer in model.buffers()]
    generator = torch.get_rng_state()
    with pytest.raises(NonFiniteStep, match=r"is '1\.1'") as raised:
        optimizer.step()
    assert raised.value.samples == ()
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_other_losses_and_skipped_backward_passes() -> None:
    """A loss of the script alone, steps without a loss, and a model without gradients."""
    accelerator, model, optimizer = prepared(SKIP)
    optimizer.step()
    (model(GOOD).sum() * math.nan).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.guard is not None
    assert [(event.quantity, event.ranks) for event in accelerator.guard.events] == [("norm", [0])]


def test_histories_continue_after_a_resume(tmp_path: Path) -> None:
    def run(begin: int, end: int, guard: StepGuard, load: bool) -> list[int]:
        accelerator, model, optimizer = prepared(guard)
        if load:
            accelerator.load_state(tmp_path / "half")
        for step in range(begin, end):
            # Without the history, five good steps would not precede it.
            factor = 1e6 if step == 8 else 1.0
            accelerator.backward(model(GOOD).square().mean() * factor + step % 3 * 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        if not load:
            accelerator.save_state(tmp_path / "half")
        assert accelerator.guard is not None
        return [event.step for event in accelerator.guard.events]

    guard = StepGuard(spike=20.0, on_spike="skip")
    assert run(0, 6, guard, load=False) == []
    assert run(6, 9, guard, load=True) == [9]


def test_a_checkpoint_without_a_history_is_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(tmp_path / "plain")
    guarded = Accelerator(cpu=True, kwargs_handlers=[StepGuard()])
    model = nn.Linear(4, 1)
    guarded.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guarded.load_state(tmp_path / "plain")


def test_a_state_that_is_loaded_between_steps_is_not_undone(tmp_path: Path) -> None:
    guard = StepGuard(nonfinite="rollback", snapshot_every=100)
    accelerator, model, optimizer = prepared(guard)
    loader = accelerator.prepare(DataLoader(torch.ones(20, 4), 2))
    for index, inputs in enumerate(loader):
        if index == 3:
            accelerator.save_state(tmp_path / "three")
            at_three = weights(model)
        if index == 6:
            accelerator.load_state(tmp_path / "three")
            assert weights(model) == at_three
        accelerator.backward(model(inputs * (math.nan if index == 8 else 1.0)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if index == 6:
            loaded = weights(model)
        if index == 8:
            break
    assert weights(model) != at_three
    assert loaded != at_three
    assert accelerator.guard is not None
    assert accelerator.guard.events[-1].action == "rollback"


def test_events_in_the_project_folder(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(
        StepGuard(spike=20.0, on_spike="skip", nonfinite="skip"), project_dir=str(tmp_path)
    )
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data[13] = math.inf
    for inputs in accelerator.prepare(DataLoader(data, 4)):
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    (line,) = (json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines())
    assert line.pop("time") > 0
    assert line == {
        "step": 4,
        "kind": "nonfinite",
        "action": "skip",
        "cause": "data",
        "quantity": "loss",
        "value": line["value"],
        "limit": None,
        "ranks": [0],
        "samples": {"0": ["12", "13", "14", "15"]},
        "batches": {"0": "epoch 0, batch 3"},
        "module": None,
        "optimizer": 0,
        "back_to": None,
    }
    assert line["value"] in ("nan", "inf")


def test_errors_name_step_ranks_and_samples() -> None:
    accelerator, model, optimizer = prepared(StepGuard(spike=1e4))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, 4, generator=generator)
    data[25] = 1e9

    def train() -> None:
        for inputs in accelerator.prepare(DataLoader(data, 2)):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(SpikeStep) as raised:
        train()
    assert "Cannot make step 13." in str(raised.value)
    assert "on process 0" in str(raised.value)
    assert raised.value.samples == ("24", "25")
    assert raised.value.kind == "data"


def tensor_parallel(clips: bool) -> dict[str, Any]:
    """A NaN in a shard of a gradient of the last process, in a run with tensor parallelism."""
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[SKIP],
        parallelism_config=ParallelismConfig(tp_size=2),
        torch_tp_plugin=TorchTensorParallelPlugin(parallelize_plan={"0": "colwise", "2": "rowwise"}),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(3):
        accelerator.backward(model(GOOD).square().mean())
        if step == 1 and accelerator.is_last_process:
            gradient: Any = next(model.parameters()).grad
            gradient.to_local()[:] = math.nan
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
    return {"skipped": skipped, "finite": all(torch.isfinite(one.to_local()).all() for one in model.parameters())}


@pytest.mark.parametrize("clips", [False, True])
def test_a_bad_shard_with_tensor_parallelism(two: Processes, clips: bool) -> None:
    assert two.run(tensor_parallel, clips) == [{"skipped": [False, True, False], "finite": True}] * 2


def uneven(rank: int) -> list[str]:
    """What a guard refuses in a run of several processes."""
    accelerator, model, _ = prepared(SKIP)
    try:
        with accelerator.join_uneven_inputs([model]):
            pass
    except NotOffered as error:
        return [error.failure]
    return []


def test_uneven_inputs_are_refused(two: Processes) -> None:
    assert two.run(uneven, 0) == [["Cannot enter join_uneven_inputs in a run with a StepGuard."]] * 2


def test_a_guarded_accelerator_is_pickled_and_freed() -> None:
    accelerator, model, optimizer = prepared(StepGuard(nonfinite="skip"))
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.guard is not None
    assert again.guard is not accelerator.guard
    seen = weakref.ref(model[0].weight)
    model, optimizer = accelerator.free_memory(model, optimizer)
    del again
    gc.collect()
    assert seen() is None


def test_a_rollback_needs_a_prepared_loader() -> None:
    accelerator, model, optimizer = prepared(StepGuard(nonfinite="rollback", snapshot_every=5))
    accelerator.backward(model(BAD).sum())
    with pytest.raises(NotReady, match="snapshot"):
        optimizer.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"nonfinite": "ignore"},
        {"on_spike": None},
        {"spike": 0.0},
        {"spike": math.inf},
        {"spike": True},
        {"window": 4},
        {"max_consecutive": 0},
        {"snapshot_every": 0},
        {"locate": 1},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        StepGuard(**settings)


def test_a_rollback_without_snapshots_is_refused() -> None:
    with pytest.raises(Conflict, match="snapshot_every"):
        StepGuard(nonfinite="rollback")


def test_limits_of_a_history() -> None:
    """The median and the median absolute deviation, computed in the plain way."""
    generator = torch.Generator().manual_seed(0)
    history, values = History(window=16, spike=2.0), list[float]()
    exceeded = 0
    for value in torch.randn(400, generator=generator).exp().tolist():
        last = torch.tensor(values[-16:], dtype=torch.float64)
        limit = None
        if len(last) >= 5:
            median = last.quantile(0.5).item()
            deviation = (last - median).abs().quantile(0.5).item()
            limit = median + 2.0 * 1.4826 * deviation
        judged = history.exceeded_by(value)
        assert (judged is not None) == (limit is not None and value > limit)
        if judged is not None:
            assert judged == pytest.approx(limit)
            exceeded += 1
        values.append(value)
        history.add(value)
    assert 10 < exceeded < 200
