"""`accel_check.parity` finds nothing in any row of the table of axes, with every backend that trains on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import accel_check
from accel_plugins.manifest import Axis, Manifest
from accel_testing.backends.sequences import COMBINATIONS, PLAN, SequenceModel, name_of, sequences

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_torch.accelerator", "accel_check.comparison", "accel_check.recorder")

SAMPLES, STEPS = 8, 3


class PlannedModel(SequenceModel):
    """A model that says how its layers are divided along the axis of tensors."""

    tp_plan: ClassVar = PLAN


def train(accelerator: Any, loader: Any) -> None:
    """Biases of keys have gradients of zero up to rounding, which AdamW makes steps of full size of."""
    model = PlannedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for inputs, targets in loader:
        with accelerator.maybe_context_parallel([inputs, targets], [1, 1], [inputs, targets]):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def batches() -> list[Any]:
    inputs, targets = sequences(SAMPLES * STEPS)
    return list(zip(inputs.chunk(STEPS), targets.chunk(STEPS), strict=True))


@pytest.mark.parametrize(("manifest", "axes"), COMBINATIONS, ids=name_of)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_row_of_the_table_equals_one_process(
    manifest: Manifest, axes: frozenset[Axis], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    report = accel_check.parity(
        train,
        batches(),
        processes=2 ** max(len(axes), 1),
        backend=manifest.name,
        axes={axis.value: 2 for axis in axes},
        mixed_precision=precision,
    )
    assert (report.verdict, report.steps) == ("equal", STEPS), report
