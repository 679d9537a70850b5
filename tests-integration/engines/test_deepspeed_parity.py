"""`accel check-parity` under DeepSpeed, whose engine takes the gradients away while it steps within backward."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel_check
from accel_check.report import ParityReport
from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("deepspeed"), reason="needs deepspeed: nox -s engines-deepspeed"),
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("preloaded_python"),
]
PRELOADED = ("deepspeed", "accel_torch.accelerator", "accel_check.comparison")

CLIPPED = 0.1


def train(accelerator: Any, loader: Any) -> None:
    """Two micro-batches a step, gradients that are clipped, and a parameter that forward does not reach."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator.gradient_accumulation_steps = 2
    model, optimizer = accelerator.prepare(model, optimizer)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIPPED)
            optimizer.step()
            optimizer.zero_grad()


def train_with_sums(accelerator: Any, loader: Any) -> None:
    """Adds the losses of the samples up, so that each process has too small a gradient."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="sum"))
        optimizer.step()
        optimizer.zero_grad()


def check(step: Any, stage: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **table: Any) -> ParityReport:
    # Engines compile C++ with ninja, which is beside the interpreter.
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # Without a threshold, stage 3 divides parameters as small as these, too.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    config = folder / "deepspeed.json"
    config.write_text(json.dumps({"zero_optimization": zero, **table}))
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(4)]
    return accel_check.parity(step, batches, launch=("--use_deepspeed", "--deepspeed_config_file", str(config)))


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_equals_one_process(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"gradient_clipping": CLIPPED, "gradient_accumulation_steps": 2}
    report = check(train, stage, tmp_path, monkeypatch, **table)

    assert report.verdict == "equal", report
    assert report.steps == 2


def test_gradients_of_sums_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check(train_with_sums, 2, tmp_path, monkeypatch)

    assert report.verdict == "differs", report
    found = next(finding for finding in report.findings if finding.what == "gradient")
    assert found.parameter in ("weight", "bias")
    assert found.ratio == pytest.approx(0.5)
