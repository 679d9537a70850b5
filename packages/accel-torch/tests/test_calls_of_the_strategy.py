"""What the Accelerator calls on the strategy of a run, seen by a backend of a third party that writes it down."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.manifest import Capabilities
from accel_state.errors import CheckpointError, Conflict, NotOffered
from accel_state.run_state import AcceleratorState
from accel_testing.processes import run_command
from accel_torch import Accelerator

BACKEND = '''
from contextlib import contextmanager

import torch
from accel_plugins import Manifest, Strategy

CALLS = []


class Recording(Strategy):
    """Averages weights never, and counts its steps in a state of its own."""

    steps = 0

    def backward(self, loss, model=None, **kwargs):
        CALLS.append(("backward", model))
        super().backward(loss, model, **kwargs)

    def after_step(self, model, optimizer):
        self.steps += 1
        CALLS.append(("after_step", model, optimizer))

    def release(self, models, optimizers):
        CALLS.append(("release", list(models), list(optimizers)))

    def close(self):
        CALLS.append(("close", self))
        print("closed")

    def extra_state(self, models, optimizers):
        CALLS.append(("extra_state", list(models), list(optimizers)))
        odd = {"odd": 1} if self.steps == 13 and self.context.process.rank else {}
        return {"steps": self.steps, "rank": torch.tensor(self.context.process.rank), **odd}

    def load_extra_state(self, state, models, optimizers):
        CALLS.append(("load_extra_state", list(models), list(optimizers)))
        assert int(state["rank"]) == self.context.process.rank
        self.steps = state["steps"]

    @contextmanager
    def global_weights(self, model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        yield
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(2)


MANIFEST = Manifest(name="recording", strategy="recording_backend:Recording", protocol=3)
'''


def write_backend(site: Path) -> Path:
    info = site / "recording_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recording-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.backends]\nrecording = recording_backend:MANIFEST\n")
    (site / "recording_backend.py").write_text(BACKEND)
    return site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of an installed backend."""
    return write_backend(tmp_path / "site")


@pytest.fixture
def backend(site: Path, fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the backend."""
    monkeypatch.syspath_prepend(str(site))
    yield importlib.import_module("recording_backend")
    AcceleratorState._reset_state(True)
    sys.modules.pop("recording_backend", None)


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 1)
    made: tuple[nn.Module, Any] = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return made


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_backward_receives_the_model_that_the_strategy_made(backend: Any) -> None:
    accelerator = Accelerator(cpu=True, backend="recording")
    model, _ = prepared(accelerator)
    accelerator.backward(torch.compile(model, backend="eager")(torch.ones(1, 2)).sum())
    assert backend.CALLS[-1] == ("backward", model)

    prepared(accelerator)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert backend.CALLS[-1] == ("backward", None)


def test_after_step_follows_each_real_step(backend: Any) -> None:
    accelerator = Accelerator(cpu=True, backend="recording", gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    other, _ = prepared(accelerator)
    for _ in range(4):
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer)

    calls = [call for call in backend.CALLS if call[0] == "after_step"]
    assert calls == [("after_step", model, optimizer.optimizer)] * 2
    both = accelerator.prepare(torch.optim.SGD([*model.parameters(), *other.parameters()]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    both.step()
    assert backend.CALLS[-1] == ("after_step", None, both.optimizer)


def test_free_memory_releases_what_the_accelerator_prepared(backend: Any) -> None:
    accelerator = Accelerator(cpu=True, backend="recording")
    model, optimizer = prepared(accelerator)
    inner = optimizer.optimizer
    accelerator.free_memory()
    assert [("release", [model], [inner])] == backend.CALLS


def test_the_last_accelerator_that_ends_its_training_closes_the_strategy_once(backend: Any) -> None:
    first, second = Accelerator(cpu=True, backend="recording"), Accelerator()
    strategy = first.session.strategy
    first.end_training()
    assert backend.CALLS == []
    second.end_training()
    second.end_training()
    assert [("close", strategy)] == backend.CALLS

    third = Accelerator()
    assert third.session.strategy is not strategy
    step(third, *prepared(third))
    AcceleratorState._reset_state(True)
    assert [call for call in backend.CALLS if call[0] == "close"] == [
        ("close", strategy),
        ("close", third.session.strategy),
    ]


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize("last_line", ["", "accelerator.end_training()", "raise SystemExit(3)"])
def test_the_strategy_is_closed_once_at_exit(site: Path, last_line: str) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from accel_torch import Accelerator\n"
        "accelerator = Accelerator(cpu=True, backend='recording')\n"
        "print('ready')\n" + last_line
    )
    done = run_command([sys.executable, "-c", script])
    assert (done.stdout.split(), done.returncode) == (["ready", "closed"], 3 if "Exit" in last_line else 0), done.stderr


def test_save_model_writes_the_global_weights_and_load_weights_reads_them(backend: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, backend="recording")
    model, _ = prepared(accelerator)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_model(model, tmp_path / "weights")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with accelerator.global_weights(model):
        assert all(torch.equal(value, before[name] * 2) for name, value in model.state_dict().items())

    accelerator.load_weights(model, tmp_path / "weights")
    assert all(torch.equal(value, before[name] * 2) for name, value in model.state_dict().items())
    accelerator.load_weights(model, before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_of_another_model_are_refused(backend: Any) -> None:
    accelerator = Accelerator(cpu=True, backend="recording")
    model, _ = prepared(accelerator)
    with pytest.raises(CheckpointError, match=r"into Linear(?s:.)*Missing key"):
        accelerator.load_weights(model, {"other": torch.ones(1)})
    with pytest.raises(CheckpointError):
        accelerator.load_weights(model, "no-such-folder")


def test_a_model_that_another_backend_prepared_is_refused(backend: Any) -> None:
    model, _ = prepared(Accelerator(cpu=True, backend="recording"))
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, backend="single")
    with pytest.raises(Conflict, match="'recording' prepared it earlier"):
        accelerator.prepare(model)


def save_and_load(site: str, folder: str) -> tuple[list[int], str]:
    """The strategy's own count of steps before and after a load, and the error of a save where names differ."""
    sys.path.insert(0, site)
    accelerator = Accelerator(cpu=True, backend="recording")
    model, optimizer = prepared(accelerator)
    strategy: Any = accelerator.session.strategy
    counts = []
    step(accelerator, model, optimizer)
    accelerator.save_state(folder)
    step(accelerator, model, optimizer)
    counts.append(strategy.steps)
    accelerator.load_state(folder)
    counts.append(strategy.steps)
    strategy.steps = 13
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        return counts, str(error)
    return counts, "nothing was raised"


def test_extra_state_of_each_process_is_saved_and_loaded(two: Any, site: Path, tmp_path: Path) -> None:
    for counts, error in two.run(save_and_load, str(site), str(tmp_path / "saved")):
        assert counts == [2, 1]
        assert "Cannot save the extra state of Recording" in error
        assert "'odd, rank, steps' on" in error
    assert {path.name for path in (tmp_path / "saved").glob("extra_state_*")} == {
        "extra_state_0.pkl",
        "extra_state_1.pkl",
    }


def test_the_extra_state_of_a_checkpoint_is_that_of_one_accelerator(backend: Any, tmp_path: Path) -> None:
    """A cell of a notebook that runs twice prepares other objects for the same strategy."""
    prepared(Accelerator(cpu=True, backend="recording"))
    accelerator = Accelerator(cpu=True, backend="recording")
    model, optimizer = prepared(accelerator)
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    assert [
        ("extra_state", [model], [optimizer.optimizer]),
        ("load_extra_state", [model], [optimizer.optimizer]),
    ] == backend.CALLS


def test_a_run_in_fp16_is_refused_when_the_backend_does_not_train_in_it(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MANIFEST", replace(backend.MANIFEST, capabilities=Capabilities(fp16=False)))
    with pytest.raises(NotOffered, match=r"fp16(?s:.)*backend 'recording'(?s:.)*bf16"):
        Accelerator(cpu=True, backend="recording", mixed_precision="fp16")


def test_a_checkpoint_without_the_extra_state_is_refused_unless_that_is_waived(backend: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, backend="recording")
    prepared(accelerator)
    accelerator.save_state(tmp_path / "saved")
    for path in ((tmp_path / "saved" / "extra_state_0.pkl"), (tmp_path / "saved" / "checkpoint_manifest.json")):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"extra_state_0\.pkl"):
        accelerator.load_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved", {"allow_missing": ("extra_state",)})
