"""Hooks of a session: when they are called, and that they can leave."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.wrapped.step_hooks import StepHooks
from accel_testing.profiling import profile
from accel_torch import Accelerator
from accel_torch.hooks import PROCESS_HOOKS, Hook, Hooks

pytestmark = pytest.mark.usefixtures("fresh_state")


class Recorder(Hook):
    """Records the events of a session, except the saves."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def before_prepare(self, session: Any, bundle: Any) -> None:
        self.events.append(f"before prepare {type(bundle.models[0]).__name__}")

    def after_prepare(self, session: Any, bundle: Any) -> None:
        self.events.append(f"after prepare {type(bundle.optimizers[0]).__name__}")

    def loader_prepared(self, session: Any, loader: Any) -> None:
        self.events.append("loader")

    def begin_micro_batch(self, models: Sequence[nn.Module]) -> None:
        self.events.append("micro-batch")

    def before_backward(self, loss: Any) -> None:
        self.events.append("before backward")

    def after_backward(self, loss: Any) -> None:
        self.events.append("after backward")

    def before_clip(self, session: Any) -> None:
        self.events.append("before clip")

    def after_clip(self, norm: Any) -> None:
        self.events.append(f"after clip {float(norm):.0f}")

    def before_step(self, optimizer: Any) -> None:
        self.events.append(f"before {type(optimizer).__name__}")

    def after_step(self, optimizer: Any, stepped: Any) -> None:
        self.events.append(f"stepped {bool(stepped)}")


class Saves(Hook):
    def __init__(self) -> None:
        self.events: list[str] = []

    def before_save(self) -> None:
        self.events.append("before")

    def after_save(self) -> None:
        self.events.append("after")


def entered(accelerator: Accelerator, hook: Any) -> Any:
    accelerator.session.hooks.enter(hook)
    return hook


def model_and_optimizer() -> tuple[Any, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_events_of_two_micro_batches() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    recorder = entered(accelerator, Recorder())
    plain, sgd = model_and_optimizer()
    data = DataLoader(TensorDataset(torch.ones(2, 1)))
    model, optimizer, loader = accelerator.prepare(plain, sgd, data)
    prepared = ["before prepare Linear", "loader", "after prepare AcceleratedOptimizer"]
    assert recorder.events == prepared
    recorder.events.clear()

    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()

    micro_batch = ["micro-batch", "before backward", "after backward"]
    assert recorder.events == [*micro_batch, *micro_batch, "before clip", "after clip 1", "before SGD", "stepped True"]


def test_a_session_calls_every_method_of_a_hook() -> None:
    methods = {name for name in vars(Hook) if not name.startswith("_")}
    assert methods == {"configure", "start_process", "start", *StepHooks.__annotations__, *Hooks.__annotations__}


def test_a_hook_may_leave_while_it_is_called() -> None:
    class Once(Hook):
        calls = 0

        def after_step(self, optimizer: Any, stepped: Any) -> None:
            self.calls += 1
            accelerator.session.hooks.leave(self)

    accelerator = Accelerator(cpu=True)
    once, recorder = entered(accelerator, Once()), entered(accelerator, Recorder())
    _, optimizer = accelerator.prepare(*model_and_optimizer())
    recorder.events.clear()
    for _ in range(3):
        optimizer.step()
    assert once.calls == 1
    assert recorder.events == ["before SGD", "stepped True"] * 3


def test_a_failed_backward_ends_and_a_failed_step_does_not() -> None:
    class Fails(Hook):
        def before_step(self, optimizer: Any) -> None:
            raise ValueError("no step")

    accelerator = Accelerator(cpu=True)
    recorder = entered(accelerator, Recorder())
    entered(accelerator, Fails())
    _, optimizer = accelerator.prepare(*model_and_optimizer())
    recorder.events.clear()
    with pytest.raises(RuntimeError, match="does not require grad"):
        accelerator.backward(torch.ones(1))
    with pytest.raises(ValueError, match="no step"):
        optimizer.step()
    assert recorder.events == ["before backward", "after backward", "before SGD"]


def test_saves_are_events(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    saves = entered(accelerator, Saves())
    model, _ = accelerator.prepare(*model_and_optimizer())
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save({}, tmp_path / "object")
    accelerator.wait_for_checkpoint()
    assert saves.events == ["before", "after"] * 4


@pytest.fixture
def process_hook() -> Iterator[Recorder]:
    recorder = Recorder()
    PROCESS_HOOKS.append(recorder)
    yield recorder
    PROCESS_HOOKS.remove(recorder)


def test_every_session_enters_the_hooks_of_the_process(process_hook: Recorder) -> None:
    for _ in range(2):
        _, optimizer = Accelerator(cpu=True).prepare(*model_and_optimizer())
        optimizer.step()
    assert process_hook.events.count("stepped True") == 2


def test_hooks_keep_nothing_alive() -> None:
    accelerator = Accelerator(cpu=True, check_replicas_every=5, straggler_report=True)
    recorder = entered(accelerator, Recorder())
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    optimizer.step()
    watched = [weakref.ref(one) for one in (accelerator, accelerator.session, model, optimizer, optimizer.optimizer)]
    gc.collect()
    gc.disable()
    try:
        del accelerator, model, optimizer
        assert [one() is None for one in watched] == [True] * 5
    finally:
        gc.enable()
    assert recorder.events


def test_a_step_passes_two_objects_of_ours() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("accel_") and module != profile.__module__:
            called.append(f"{module}.{frame.f_code.co_name}")

    # The guard against misuse watches two steps, and leaves.
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    with profile(note):
        optimizer.step()
    assert called == ["accel_plugins.wrapped.optimizer.step", "accel_plugins.precision.base.step"]
