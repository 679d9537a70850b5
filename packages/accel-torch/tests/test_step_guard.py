"""The guard of steps: twenty planted faults, and the same right action on all processes.

Each process reads 12 batches of 4 samples in random order. Faults are on the last process alone where a row
says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    BadStep,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ModelAverage,
    StepGuard,
    set_seed,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


class Planted(NamedTuple):
    """A fault, and what is expected.

    Args:
        name: what is wrong.
        fault: the fault that the loop plants.
        step: the step at which it is planted, from 1.
        events: (step, kind, action) of each event.
        cause: the cause of every event.
        raises: name of the error that ends the run, or empty.
        guard: the settings of the guard.
        run: the settings of the loop.
    """

    name: str
    fault: str
    step: int
    events: tuple[tuple[int, str, str], ...]
    cause: str
    raises: str = ""
    guard: Mapping[str, Any] | None = None
    run: Mapping[str, Any] | None = None


SKIP: dict[str, Any] = {"nonfinite": "skip", "spike": 20.0, "on_spike": "skip"}
RAISE: dict[str, Any] = {"spike": 20.0}
BACK: dict[str, Any] = {"nonfinite": "rollback", "spike": 20.0, "on_spike": "rollback", "snapshot_every": 3}

PLANTED = (
    Planted(
        "a sample with a NaN on one process", "nan sample", 8, ((8, "nonfinite", "raise"),), "data", "NonFiniteStep"
    ),
    Planted("an infinite label on one process", "infinite label", 8, ((8, "nonfinite", "skip"),), "data", guard=SKIP),
    Planted("a NaN in the first step", "nan sample", 1, ((1, "nonfinite", "skip"),), "data", guard=SKIP),
    Planted(
        "a NaN in the last, short window of an epoch",
        "nan sample",
        3,
        ((3, "nonfinite", "skip"),),
        "data",
        guard=SKIP,
        run={"accumulation": 5},
    ),
    Planted(
        "a NaN in one micro-batch of a window with weights",
        "nan sample",
        4,
        ((4, "nonfinite", "skip"),),
        "data",
        guard=SKIP,
        run={"accumulation": 2, "weights": True},
    ),
    Planted("a huge label on one process", "huge label", 9, ((9, "spike", "skip"),), "data", guard=SKIP),
    Planted(
        "a learning rate that grows a hundredfold",
        "learning rate",
        9,
        ((10, "spike", "raise"),),
        "numerics",
        "SpikeStep",
        guard=RAISE,
    ),
    Planted(
        "a learning rate at which weights overflow",
        "infinite learning rate",
        9,
        ((10, "nonfinite", "raise"),),
        "numerics",
        "NonFiniteStep",
    ),
    Planted(
        "a flipped bit in a gradient of one process, before it is reduced",
        "flip before reduction",
        8,
        ((8, "nonfinite", "skip"),),
        "hardware",
        guard=SKIP,
    ),
    Planted(
        "a flipped bit in a weight of one process",
        "flip weight",
        8,
        ((8, "nonfinite", "raise"),),
        "hardware",
        "NonFiniteStep",
    ),
    Planted(
        "a flipped bit in a gradient that one process received",
        "flip after reduction",
        8,
        ((8, "nonfinite", "skip"),),
        "hardware",
        guard=SKIP,
    ),
    Planted(
        "a flipped bit that leaves a gradient finite",
        "small flip",
        9,
        ((9, "spike", "skip"),),
        "hardware",
        guard=SKIP,
    ),
    Planted(
        "an overflow in fp16 that the gradient scaler handles",
        "overflow",
        6,
        (),
        "",
        guard=SKIP,
        run={"precision": "fp16"},
    ),
    Planted(
        "a NaN in fp16",
        "nan sample",
        8,
        ((8, "nonfinite", "skip"),),
        "data",
        guard=SKIP,
        run={"precision": "fp16"},
    ),
    Planted(
        "a NaN in the loss of the second optimizer",
        "nan in second loss",
        7,
        ((7, "nonfinite", "skip"),),
        "data",
        guard={"nonfinite": "skip"},
        run={"loop": "two optimizers"},
    ),
    Planted(
        "a root of zero, whose loss is finite and whose gradients are not",
        "root of zero",
        8,
        ((8, "nonfinite", "skip"),),
        "numerics",
        guard=SKIP,
    ),
    Planted("a NaN in a loss of one process without a backward pass", "nan aside", 8, (), "", guard=SKIP),
    Planted("a NaN in an evaluation between two steps", "nan in evaluation", 8, (), "", guard=SKIP),
    Planted(
        "a NaN from which the run returns to a snapshot",
        "nan sample",
        8,
        ((8, "nonfinite", "rollback"),),
        "data",
        guard=BACK,
    ),
    Planted(
        "three bad steps in a row",
        "nan samples from here",
        7,
        ((7, "nonfinite", "skip"), (8, "nonfinite", "skip"), (9, "nonfinite", "raise")),
        "data",
        "NonFiniteStep",
        guard=SKIP,
    ),
)


SAMPLES, BATCH = 48, 4
"""Samples of a process in an epoch, and in a batch."""


class Samples(Dataset[Any]):
    """Regression data; some samples are bad."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, 8, generator=generator)
        self.targets = self.inputs[:, :1].sin() + 2
        self.bad: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs, target, bad = self.inputs[index].clone(), self.targets[index].clone(), self.bad.get(index)
        if bad == "nan sample":
            inputs[3] = math.nan
        elif bad == "infinite label":
            target[0] = math.inf
        elif bad == "huge label":
            target[0] = 1e6
        return inputs, target, index


class Net(nn.Module):
    """Two layers, with dropout and a buffer that forward changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Dropout(0.1),
            nn.Linear(16, 1),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += inputs.detach().mean(0)
        hidden: torch.Tensor = self.down(self.drop(torch.relu(self.norm(self.up(inputs)))))
        return hidden


def accelerator_of(engine: str, guard: StepGuard | None, folder: str | None = None, **options: Any) -> Accelerator:
    """An Accelerator on the CPU with an engine: "single", "ddp" or "fsdp2"."""
    handlers: list[Any] = [] if guard is None else [guard]
    if options.get("mixed_precision") == "fp16":
        handlers.append(GradScalerKwargs(init_scale=1024.0))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP") if engine == "fsdp2" else None
    data = DataLoaderConfiguration(use_seedable_sampler=True)
    return Accelerator(
        cpu=True, dataloader_config=data, fsdp_plugin=plugin, kwargs_handlers=handlers, project_dir=folder, **options
    )


def local(tensor: Any) -> torch.Tensor:
    """This process's part."""
    part: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)().detach()
    return part


def weights_of(model: nn.Module) -> list[list[float]]:
    """This process's parts of the parameters and buffers."""
    return [local(one).flatten().tolist() for one in (*model.parameters(), *model.buffers())]


def flip(value: torch.Tensor) -> None:
    """Flip the highest bit of the exponent of the first element."""
    bits = value.view(-1)[:1].view(torch.int32)
    bits ^= 1 << 30


def events_of(accelerator: Accelerator) -> list[tuple[int, str, str]]:
    """(step, kind, action) of each event."""
    assert accelerator.guard is not None
    return [(event.step, event.kind, event.action) for event in accelerator.guard.events]


def outcome(accelerator: Accelerator, error: BadStep | None, **more: Any) -> dict[str, Any]:
    """What a test compares."""
    assert accelerator.guard is not None
    return {
        "events": events_of(accelerator),
        "causes": [event.cause for event in accelerator.guard.events],
        "raised": "" if error is None else type(error).__name__,
        "message": str(error),
        **more,
    }


class Plant:
    """Plants a fault while a loop runs."""

    def __init__(self, case: Planted, accelerator: Accelerator, samples: Samples) -> None:
        self.case, self.accelerator, self.samples = case, accelerator, samples
        self.is_last = accelerator.is_last_process

    def into_data(self, order: list[list[int]]) -> None:
        """Make a sample bad, given the samples of this process by step."""
        if self.is_last and self.case.fault in ("nan sample", "infinite label", "huge label"):
            self.samples.bad[order[self.case.step - 1][-1]] = self.case.fault
        if self.is_last and self.case.fault == "nan samples from here":
            self.samples.bad.update(
                dict.fromkeys((one for step in order[self.case.step - 1 :] for one in step), "nan sample")
            )

    def loss(self, step: int, loss: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Change the loss of a step."""
        if step != self.case.step:
            return loss
        if self.case.fault == "root of zero":
            return loss + torch.sqrt(outputs * 0).sum()
        if self.case.fault == "overflow":
            return loss * 1e36
        if self.case.fault == "nan aside" and self.is_last:
            assert not torch.isfinite(loss * math.nan)
        return loss

    def before_backward(self, step: int, model: nn.Module) -> Any:
        """A handle of a hook that flips a bit of a gradient before it is reduced."""
        if step == self.case.step and self.is_last and self.case.fault == "flip before reduction":
            bias = list(model.parameters())[1]

            def hook(gradient: torch.Tensor) -> torch.Tensor:
                changed = gradient.clone()
                if not hasattr(changed, "to_local"):
                    flip(changed)
                return changed

            return bias.register_hook(hook)
        return None

    def gradients(self, step: int, model: nn.Module) -> None:
        """Change gradients of this process."""
        gradient = next(model.parameters()).grad
        if step != self.case.step or gradient is None:
            return
        value, is_shard = local(gradient), hasattr(gradient, "to_local")
        fault = self.case.fault if self.is_last else ""
        if fault == "flip after reduction" or (fault == "flip before reduction" and is_shard):
            flip(value)
        elif self.case.fault == "small flip" and (self.is_last or not is_shard):
            value.view(-1)[0] = 2.0**-66
            flip(value)

    def before_step(self, step: int, model: nn.Module, optimizer: Any) -> None:
        """Change weights or settings between two steps: before the forward pass of a step."""
        if step == self.case.step and self.case.fault == "flip weight" and self.is_last:
            flip(local(next(model.parameters())))
        if step == self.case.step and "learning rate" in self.case.fault:
            factor = 1e38 if "infinite" in self.case.fault else 100.0
            for group in optimizer.param_groups:
                group["lr"] *= factor


def orders(loader: Any, accumulation: int) -> list[list[int]]:
    """The samples of this process in each step of the first epoch, which are read without training."""
    batches = [indices.tolist() for *_, indices in loader]
    loader.set_epoch(0)
    starts = range(0, len(batches), accumulation)
    return [[one for batch in batches[at : at + accumulation] for one in batch] for at in starts]


class Run:
    """Trains with a planted fault on this process."""

    def __init__(self, case: Planted, engine: str) -> None:
        set_seed(0)
        run = case.run or {}
        self.case, self.accumulation = case, run.get("accumulation", 1)
        self.weights, self.precision = bool(run.get("weights")), run.get("precision", "no")
        self.accelerator = accelerator_of(
            engine,
            StepGuard(**(case.guard or {})),
            gradient_accumulation_steps=self.accumulation,
            mixed_precision=self.precision,
        )
        samples, plain = Samples(SAMPLES * self.accelerator.num_processes), Net()
        optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.003)
        if "learning rate" in case.fault:
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
        loader = DataLoader(samples, BATCH, shuffle=True)
        prepared = self.accelerator.prepare(plain, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.average = ModelAverage(self.model, decay=0.9)
        self.plant = Plant(case, self.accelerator, samples)
        self.plant.into_data(orders(self.loader, self.accumulation))
        self.inner = self.accelerator.unwrap_model(self.model)
        self.step, self.good = 1, 0

    def parameters(self) -> list[list[float]]:
        """This process's parts of the parameters."""
        return weights_of(self.inner)[: len(list(self.inner.parameters()))]

    def micro_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One micro-batch, with the fault."""
        accelerator, inner = self.accelerator, self.inner
        self.plant.before_step(self.step, inner, self.optimizer)
        handle = self.plant.before_backward(self.step, inner)
        self.before = self.parameters()
        outputs = self.model(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        accelerator.backward(self.plant.loss(self.step, loss, outputs))
        if handle is not None:
            handle.remove()
        if accelerator.sync_gradients:
            self.plant.gradients(self.step, inner)
            if self.step % 2 == 0:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if accelerator.sync_gradients:
            self.check_step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def check_step(self) -> None:
        """A step that was left out changed nothing."""
        self.step += 1
        if not self.accelerator.optimizer_step_was_skipped:
            self.good += 1
            return
        assert self.precision == "fp16" or all(parameter.grad is None for parameter in self.inner.parameters())
        assert self.parameters() == self.before

    def __call__(self) -> dict[str, Any]:
        error: BadStep | None = None
        try:
            for inputs, targets, _ in self.loader:
                with self.accelerator.accumulate(self.model, **({"weight": len(inputs)} if self.weights else {})):
                    self.micro_batch(inputs, targets)
                if self.case.fault == "nan in evaluation" and self.step == self.case.step:
                    evaluate(self.model)
        except BadStep as raised:
            error = raised
            assert self.parameters() == self.before
        assert self.case.guard is None or "snapshot_every" in self.case.guard or self.average.updates == self.good
        finite = all(math.isfinite(value) for values in weights_of(self.inner) for value in values)
        return outcome(self.accelerator, error, finite=finite)


def run_case(case: Planted, engine: str) -> dict[str, Any]:
    """Train with a planted fault on this process."""
    loop = run_two_optimizers if (case.run or {}).get("loop") == "two optimizers" else lambda *of: Run(*of)()
    return loop(case, engine)


def evaluate(model: nn.Module) -> None:
    """An evaluation that finds a NaN."""
    model.eval()
    with torch.no_grad():
        assert not torch.isfinite(model(torch.full((2, 8), math.nan))).any()
    model.train()


def run_two_optimizers(case: Planted, engine: str) -> dict[str, Any]:
    """Two models, each with an optimizer that steps after its own loss."""
    set_seed(0)
    accelerator = accelerator_of(engine, StepGuard(**(case.guard or {})))
    models = [nn.Linear(8, 4), nn.Linear(8, 4)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    first, second = (accelerator.prepare(*pair) for pair in zip(models, optimizers, strict=True))
    skipped = []
    for step in range(1, 13):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for model, optimizer in (first, second):
            loss = model(inputs).square().mean()
            if step == case.step and model is second[0] and accelerator.is_last_process:
                loss = loss * math.nan
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        skipped.append([first[1].step_was_skipped, second[1].step_was_skipped])
    assert accelerator.guard is not None
    assert [event.optimizer for event in accelerator.guard.events] == [1]
    assert [step for step, both in enumerate(skipped, 1) if any(both)] == [case.step]
    assert skipped[case.step - 1] == [False, True]
    return outcome(accelerator, None, finite=True)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_planted_faults_on_two_processes(two: Processes, engine: str, case: Planted) -> None:
    for one in two.run(run_case, case, engine):
        compare(case, one)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_planted_faults_in_one_process(case: Planted) -> None:
    compare(case, run_case(case, "single"))


def compare(case: Planted, one: dict[str, Any]) -> None:
    """Compare what happened on a process with what is expected."""
    assert one["events"] == [*case.events], one
    assert one["raised"] == case.raises, one
    assert one["finite"] or case.raises, one
    assert set(one["causes"]) == ({case.cause} if case.cause else set()), one
