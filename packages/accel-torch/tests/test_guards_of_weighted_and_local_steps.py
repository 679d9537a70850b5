"""A guard of steps with losses that have weights of their own, and with processes that train separately."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_state.errors import NotOffered
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, LocalSGD, StepGuard, set_seed

pytestmark = pytest.mark.usefixtures("fresh_state")

BAD_STEP = 8
"""The step of a fault, from 1."""


def accelerator_of(engine: str, guard: StepGuard | None, **options: Any) -> Accelerator:
    sharded = FullyShardedDataParallelPlugin(fsdp_version=2) if engine == "fsdp2" else None
    return Accelerator(cpu=True, fsdp_plugin=sharded, kwargs_handlers=[guard] if guard else [], **options)


def prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    prepared: tuple[Any, Any] = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return prepared


def weights(model: nn.Module) -> list[list[float]]:
    return [getattr(one, "to_local", lambda one=one: one)().detach().flatten().tolist() for one in model.parameters()]


def is_finite(values: list[list[float]]) -> bool:
    return all(math.isfinite(value) for one in values for value in one)


# ---------------------------------------------------------------------- losses with weights


def targets_of(step: int, micro_batch: int, process: int, fault: float) -> list[float]:
    """The targets of a micro-batch; those of processes and micro-batches differ in number."""
    targets = [1.0 + 0.01 * ((step * 7 + micro_batch * 3 + one) % 5) for one in range(1 + (micro_batch + process) % 3)]
    if step == BAD_STEP and micro_batch == 0 and process == 0:
        targets[0] = fault
    return targets


def train_with_weights(engine: str, steps: int, kinds: int, fault: float) -> dict[str, Any]:
    """Steps with one or two losses in each micro-batch; the target of the first sample of one step is the fault."""
    accelerator = accelerator_of(
        engine,
        StepGuard(nonfinite="skip", spike=50.0, on_spike="skip", max_consecutive=9),
        gradient_accumulation_steps=steps,
    )
    model, optimizer = prepared(accelerator)
    skipped: list[int] = []
    sums: list[list[float]] = []
    for step in range(1, 13):
        before, sums = weights(model), [[0.0, 0.0] for _ in range(kinds)] if step <= BAD_STEP else sums
        for micro_batch in range(steps):
            targets = torch.tensor(targets_of(step, micro_batch, accelerator.process_index, fault)).unsqueeze(1)
            with accelerator.accumulate(model):
                outputs = model(torch.ones(len(targets), 4))
                losses = [((outputs - targets).square().mean(), len(targets)), (outputs.abs().mean(), 3.0)][:kinds]
                for loss, weight in losses:
                    accelerator.backward(loss, weight=weight)
                for (loss, weight), total in zip(losses, sums, strict=True):
                    if step == BAD_STEP:
                        total[0] += loss.item() * weight
                        total[1] += weight
                optimizer.step()
                optimizer.zero_grad()
        if accelerator.optimizer_step_was_skipped:
            skipped.append(step)
            assert weights(model) == before
    assert accelerator.guard is not None
    (event,) = accelerator.guard.events
    return {
        "skipped": skipped,
        "event": (event.step, event.kind, event.quantity, event.cause, event.ranks),
        "value": event.value,
        "sums": sums,
        "finite": is_finite(weights(model)),
    }


WINDOWS = [(1, 1), (2, 1), (1, 2), (3, 2)]
"""Micro-batches of a window, and losses of a micro-batch."""


def check_judged(results: list[dict[str, Any]], kind: str) -> None:
    totals = [
        [sum(column) for column in zip(*of_kind, strict=True)]
        for of_kind in zip(*(r["sums"] for r in results), strict=True)
    ]
    expected = sum(total / weight for total, weight in totals)
    for result in results:
        assert result["skipped"] == [BAD_STEP]
        assert result["event"][:3] == (BAD_STEP, kind, "loss")
        assert result["event"][4] == [0]
        assert result["finite"]
        if kind == "spike":
            assert result["value"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("fault", "kind"), [(math.nan, "nonfinite"), (1e4, "spike")])
@pytest.mark.parametrize(("steps", "kinds"), WINDOWS)
def test_the_judged_loss_is_weighted_as_the_gradients_are(steps: int, kinds: int, fault: float, kind: str) -> None:
    check_judged([train_with_weights("single", steps, kinds, fault)], kind)


@pytest.mark.parametrize(("fault", "kind"), [(math.nan, "nonfinite"), (1e4, "spike")])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("steps", "kinds"), WINDOWS)
def test_processes_judge_one_weighted_loss(
    two: Processes, engine: str, steps: int, kinds: int, fault: float, kind: str
) -> None:
    check_judged(two.run(train_with_weights, engine, steps, kinds, fault), kind)


# ---------------------------------------------------------------------- LocalSGD


class Samples(torch.utils.data.Dataset[Any]):
    """Regression data."""

    def __init__(self, size: int) -> None:
        self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.inputs[index].sum(), index


def train_locally(guard: StepGuard | None, fault: float, leaves_out: bool = False) -> dict[str, Any]:
    """Twelve steps of processes that average every four; in one step, the targets of the second process are the fault.

    Args:
        guard: the settings of the guard.
        fault: factor of the targets.
        leaves_out: whether the script itself leaves out this batch on all processes.
    """
    set_seed(0)
    accelerator = accelerator_of("ddp", guard)
    model, optimizer = prepared(accelerator)
    loader = accelerator.prepare(DataLoader(Samples(12 * 3 * accelerator.num_processes), 3))
    first_seen: dict[int, int] = {}
    apart: list[Any] = []
    together: list[Any] = []
    with LocalSGD(accelerator, model, 4) as local_sgd:
        for inputs, targets, indices in loader:
            step = first_seen.setdefault(int(indices[0]), len(first_seen) + 1)
            if step == BAD_STEP and leaves_out:
                continue
            if step == BAD_STEP and accelerator.is_last_process:
                targets *= fault
            before = weights(model)
            accelerator.backward((model(inputs).squeeze(1) - targets).square().mean())
            optimizer.step()
            if accelerator.optimizer_step_was_skipped:
                assert weights(model) == before
            optimizer.zero_grad()
            local_sgd.step()
            (together if local_sgd.num_steps % 4 == 0 else apart).append(weights(model))
    guard_of_run = accelerator.guard
    return {
        "events": [] if guard_of_run is None else [event._replace(time=0.0) for event in guard_of_run.events],
        "weights": weights(model),
        "apart": apart,
        "together": together,
    }


@pytest.mark.parametrize(
    ("fault", "kind", "quantity"), [(math.nan, "nonfinite", "loss"), (1e6, "spike", "loss")], ids=["nan", "spike"]
)
def test_processes_that_train_separately_leave_out_the_same_step(
    two: Processes, fault: float, kind: str, quantity: str
) -> None:
    first, second = two.run(train_locally, StepGuard(nonfinite="skip", spike=50.0, on_spike="skip"), fault)
    assert [repr(event) for event in first["events"]] == [repr(event) for event in second["events"]]
    (event,) = first["events"]
    assert (event.step, event.kind, event.quantity, event.cause, event.ranks) == (BAD_STEP, kind, quantity, "data", [1])
    assert event.samples[1]
    assert first["together"] == second["together"]
    assert all(one != other for one, other in zip(first["apart"], second["apart"], strict=True))
    assert is_finite(first["weights"])


def test_processes_that_train_separately_raise_together(two: Processes) -> None:
    answers = two.run(error_of_local_steps, StepGuard(), "no")
    assert answers[0] == answers[1]
    assert answers[0].startswith("NonFiniteStep: Cannot make step 8.")


def error_of_local_steps(guard: StepGuard, precision: str) -> str:
    """The error of a local training with a NaN."""
    try:
        if precision == "fp16":
            accelerator = accelerator_of("ddp", guard, mixed_precision="fp16")
            with LocalSGD(accelerator, prepared(accelerator)[0], 4):
                pass
        else:
            train_locally(guard, math.nan)
    except (ArithmeticError, NotOffered) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_separate_loss_scales_are_refused(two: Processes) -> None:
    answers = two.run(error_of_local_steps, StepGuard(), "fp16")
    assert answers[0] == answers[1]
    assert answers[0].startswith("NotOffered: Cannot train replicas separately in fp16 with a StepGuard.")


def test_separate_replicas_return_to_a_snapshot(two: Processes) -> None:
    """The weights, and the steps at which they are averaged, are those of a run that never saw the batch."""
    expected = two.run(train_locally, None, 1.0, True)
    received = two.run(train_locally, StepGuard(nonfinite="rollback", snapshot_every=3), math.nan)
    for one, other in zip(received, expected, strict=True):
        assert [event.action for event in one["events"]] == ["rollback"]
        assert one["weights"] == other["weights"]
