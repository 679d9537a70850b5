"""Rollbacks of bad steps: afterwards a run is bit for bit one that never saw the bad windows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ModelAverage,
    StepGuard,
    set_seed,
)

pytestmark = pytest.mark.usefixtures("fresh_state")

BATCH, BATCHES = 3, 12
"""Samples of a process in a batch, and its batches in an epoch."""


class Samples(Dataset[Any]):
    """Regression data; a sample with a position in `bad` is NaN."""

    def __init__(self, size: int, bad: frozenset[int]) -> None:
        self.inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs = self.inputs[index] * (math.nan if index in self.bad else 1.0)
        return {"inputs": inputs, "target": self.inputs[index].sum(), "index": index}


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Mean(nn.Module):
    """Subtracts a running mean, a buffer that forward changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(inputs.detach().mean(0).float(), 0.1)
        return inputs - self.seen.to(inputs.dtype)


def net() -> nn.Module:
    return nn.Sequential(Mean(), nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))


def bits(value: Any) -> Any:
    """Tensors as bytes, also in containers, so that they are compared bit for bit."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "to_local", lambda: value)().detach()
        return local.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


class Run:
    """A run, with a guard that returns to snapshots, or without the bad windows.

    Args:
        engine: "single", "ddp" or "fsdp2".
        bad: windows that contain a NaN on the last process, by (epoch, number), from 0.
        guards: False: a run without a guard, which does not see these windows.
        options: accumulation, epochs, kind (of loader), precision, optimizers.
    """

    def __init__(self, engine: str, bad: list[tuple[int, int]], guards: bool, **options: Any) -> None:
        set_seed(3)
        self.bad, self.guards, self.options = bad, guards, options
        self.accumulation = options.get("accumulation", 1)
        guard = StepGuard(nonfinite="rollback", snapshot_every=options.get("every", 3), max_consecutive=50)
        handlers: list[Any] = [guard] if guards else []
        if options.get("precision") == "fp16":
            handlers.append(GradScalerKwargs(init_scale=1024.0, growth_interval=4))
        kind = options.get("kind", "")
        sharded = FullyShardedDataParallelPlugin(fsdp_version=2) if engine == "fsdp2" else None
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=sharded,
            mixed_precision=options.get("precision", "no"),
            gradient_accumulation_steps=self.accumulation,
            kwargs_handlers=handlers,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, dispatch_batches=kind == "dispatched"),
        )
        count = self.accelerator.num_processes
        samples = Samples(BATCH * BATCHES * count - (1 if kind == "short" else 0), frozenset())
        data: Any = Stream(samples) if kind == "stream" else samples
        workers = 2 if kind == "workers" else 0
        loader: Any = DataLoader(data, BATCH, shuffle=kind != "stream", num_workers=workers)
        plain = [net() for _ in range(options.get("optimizers", 1))]
        steppers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in plain]
        schedules: list[Any] = [torch.optim.lr_scheduler.StepLR(one, 3, gamma=0.8) for one in steppers]
        self.loader = self.accelerator.prepare(loader)
        self.trained = [self.accelerator.prepare(*one) for one in zip(plain, steppers, schedules, strict=True)]
        self.average = ModelAverage(self.trained[0][0], decay=0.7)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.seen: list[int] = []

    def epoch(self, epoch: int) -> None:
        """One epoch; a batch of a bad window has a NaN, or is not seen."""
        loader = self.loader
        if self.options.get("kind") == "skipping":
            loader = self.accelerator.skip_first_batches(loader, 3)
        windows = [number for at, number in self.bad if at == epoch]
        first_seen: dict[int, int] = {}
        for batch in loader:
            # The window of a batch is that in which it was received first.
            key = int(batch["index"].min())
            number = first_seen.setdefault(key, len(first_seen)) // self.accumulation
            if number in windows:
                if not self.guards:
                    continue
                if self.accelerator.is_last_process:
                    batch["inputs"] *= math.nan
            self.micro_batch(batch)

    def micro_batch(self, batch: Any) -> None:
        """Train every model on a batch."""
        models = [model for model, *_ in self.trained]
        with self.accelerator.accumulate(*models):
            self.seen.append(int(batch["index"].min()))
            for model, optimizer, schedule in self.trained:
                output = model(batch["inputs"]).squeeze(-1)
                self.accelerator.backward(nn.functional.mse_loss(output, batch["target"]))
                if self.accelerator.sync_gradients and self.options.get("clips", True):
                    self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.counter.count += 1
                random.random()
                torch.rand(1)

    def state(self) -> dict[str, Any]:
        """Everything that must be equal."""
        states: dict[str, Any] = {}
        for index, (model, optimizer, schedule) in enumerate(self.trained):
            states[f"weights {index}"] = bits([*model.parameters(), *model.buffers()])
            states[f"optimizer {index}"] = bits(optimizer.state_dict()["state"])
            states[f"rate {index}"] = schedule.get_last_lr()
        with self.average.applied():
            states["average"] = bits(list(self.trained[0][0].parameters()))
        scaler = self.accelerator.scaler
        return {
            **states,
            "updates": self.average.updates,
            "count": self.counter.count,
            "generators": [bits(torch.get_rng_state()), random.getstate()],
            "scale": None if scaler is None else scaler.state_dict(),
        }

    def __call__(self) -> dict[str, Any]:
        for epoch in range(self.options.get("epochs", 1)):
            self.epoch(epoch)
        events = [] if self.accelerator.guard is None else self.accelerator.guard.events
        return {"state": self.state(), "events": [(one.step, one.action, one.back_to) for one in events]}


def train(engine: str, bad: list[tuple[int, int]], guards: bool, options: dict[str, Any]) -> dict[str, Any]:
    """A run on this process."""
    return Run(engine, bad, guards, **options)()


CASES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "in the middle": ([(0, 7)], {}),
    "the first window": ([(0, 0)], {}),
    "the last window": ([(0, 11)], {}),
    "several": ([(0, 1), (0, 2), (0, 5), (0, 10)], {}),
    "in the second epoch": ([(0, 11), (1, 0), (1, 4)], {"epochs": 2}),
    "windows of two micro-batches": ([(0, 2), (0, 4)], {"accumulation": 2, "every": 2}),
    "a short last window": ([(0, 2)], {"accumulation": 5, "every": 1}),
    "without clipping": ([(0, 7)], {"clips": False}),
    "two optimizers": ([(0, 4)], {"optimizers": 2}),
    "fp16": ([(0, 7)], {"precision": "fp16"}),
    "a stream": ([(0, 7)], {"kind": "stream"}),
    "workers": ([(0, 7), (0, 11)], {"kind": "workers"}),
    "dispatched": ([(0, 7)], {"kind": "dispatched"}),
    "a short last batch": ([(0, 11)], {"kind": "short", "epochs": 2}),
    "skipped batches": ([(0, 4)], {"kind": "skipping"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_returns_equals_one_without_the_window(name: str) -> None:
    bad, options = CASES[name]
    with fresh():
        expected = train("single", bad, False, options)
    with fresh():
        received = train("single", bad, True, options)
    assert len(received["events"]) == len(bad), received["events"]
    assert received["state"] == expected["state"]


@pytest.mark.parametrize("name", ["several", "in the second epoch", "two optimizers", "fp16", "dispatched", "workers"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_return_together(two: Processes, engine: str, name: str) -> None:
    bad, options = CASES[name]
    expected = two.run(train, engine, bad, False, options)
    received = two.run(train, engine, bad, True, options)
    assert [len(one["events"]) for one in received] == [len(bad)] * 2
    assert [one["state"] for one in received] == [one["state"] for one in expected]
