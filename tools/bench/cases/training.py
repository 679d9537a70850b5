"""Training: steps, schedules, logging, comparing replicas, and sharding."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

from bench.case import Call, Case, Scope, Side, Work
from bench.metering import paused

STEPS, LOGGED, PROCESSES, SCHEDULED = 400, 2000, 1024, 50

ADDED: Final = (
    "CPU time of the prepared loop (accumulate, backward, step, scheduler, zero_grad) on one process, in rounds of 400 "
    "steps, with the status file and the goodput account of `accel launch --project_dir`; "
    '"raw" is the plain loop, with `torch.autocast` only for bf16. The value of the original is what it adds to a raw '
    "loop in its interpreter."
)
SCHEDULES: Final = (
    "CPU time of a scheduler step in a run of 1024 processes, in which a schedule advances by 1024 of its own steps. "
    'Where the figure is a ratio, "raw" is 1024 plain steps.'
)
LOGGING: Final = (
    'CPU time of `accelerator.log`, in rounds of 2,000 calls; "raw" is `json.dumps` and a write of the same line.'
)
WATCHING: Final = (
    'Replicas: wall time of a step of about 1 ms on two processes over gloo, in rounds of 400; "raw" is an Accelerator '
    "without comparison."
)
ACCOUNTED: Final = 'Steps over a prepared loader; "raw" keeps no account of its time.'
LOOKED_AT: Final = (
    "Status: CPU time of a step of about 1 ms on two processes over gloo, in rounds of 400, while a thread writes what "
    '`accel runs status` reads twice a second; "raw" is the same step without that thread and without a count of '
    "steps."
)
SHARDING: Final = (
    'A model of 200 blocks on two processes over gloo; "raw" calls `fully_shard` for each block and for the model. '
    "The original is missing because it runs DDP instead of FSDP on a CPU. Peak memory is the increase since before "
    "the model was built."
)
BUILDING: Final = (
    "init_module: a model of 2,013 MB (15 blocks of two linear layers) with random weights is built inside "
    "`Accelerator.init_module()` and prepared, on two processes over gloo. Peak memory is the increase of one process; "
    "the limit is 0.6 of the model."
)


# ---------------------------------------------------------------- steps
def parts() -> tuple[Any, Any, Any, Any]:
    """A small model, its optimizer and schedule, and a loader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randn(STEPS * 4, 1))
    return model, optimizer, scheduler, DataLoader(data, batch_size=4)


def plain_steps(precision: str, accumulation: int, scope: Scope) -> Call:
    """The loop as it is written without any library."""
    import torch

    model, optimizer, scheduler, loader = parts()
    narrow = precision == "bf16"

    def steps() -> None:
        for index, (inputs, targets) in enumerate(loader, start=1):
            if narrow:
                with torch.autocast("cpu", torch.bfloat16):
                    outputs = model(inputs)
                outputs = outputs.float()
            else:
                outputs = model(inputs)
            loss = torch.nn.functional.mse_loss(outputs, targets)
            (loss / accumulation if accumulation > 1 else loss).backward()  # type: ignore[no-untyped-call]
            if index % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return steps


def prepared_steps(precision: str, accumulation: int, scope: Scope) -> Call:
    """The loop with an Accelerator."""
    import torch

    library, settings = scope.library("accel_torch", "accelerate"), {}
    if scope.kind == "ours":
        # What `accel launch --project_dir` turns on: status and goodput.
        os.environ["ACCEL_STATUS_FOLDER"] = str(scope.folder)
        settings = {"goodput": True, "project_dir": str(scope.folder)}
    accelerator = library.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation, **settings
    )
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())

    def steps() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return steps


def steps(name: str, precision: str, accumulation: int, limit: float) -> tuple[Case, Case]:
    """What a library adds to a step: beside the plain step, and beside what the original adds."""
    prepared = partial(prepared_steps, precision, accumulation)
    work = Work(prepared, prepared, partial(plain_steps, precision, accumulation), alone=True)
    case = partial(Case, "steps", work=work, method=ADDED, per=STEPS)
    unit = "CPU us per step"
    return (
        case(name=name, unit=unit, figure="ours - raw", limit=limit),
        case(name=f"{name}: added alone", unit=unit, figure="(ours - raw)/(peer - raw)", limit=0.12),
    )


# ---------------------------------------------------------------- schedules
HORIZON: Final = PROCESSES * (SCHEDULED + 2)
"""Steps of its own that a schedule has."""

EVERY: Final = 100
"""Steps between two milestones."""

MakeSchedule = Callable[[Any, Any], Any]
"""Makes a schedule of a class in the module of schedules, for an optimizer."""


def optimizer() -> Any:
    """An optimizer of one number."""
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def scheduled(make: MakeSchedule, scope: Scope) -> Call:
    """Steps of the prepared schedule, each time of a new one that has stepped once."""
    from torch.optim import lr_scheduler

    from accel_plugins.wrapped.scheduler import AcceleratedScheduler
    from accel_state.gradient import GradientState

    def several() -> None:
        with paused():
            own = optimizer()
            schedule = make(lr_scheduler, own)
            prepared = AcceleratedScheduler(schedule, own, gradient=GradientState(), processes=PROCESSES)
            prepared.step()
        for _ in range(SCHEDULED):
            prepared.step()

    return several


def plainly_scheduled(make: MakeSchedule, scope: Scope) -> Call:
    """As many steps of the plain schedule."""
    from torch.optim import lr_scheduler

    def several() -> None:
        with paused():
            plain = make(lr_scheduler, optimizer())
        for _ in range(PROCESSES * SCHEDULED):
            plain.step()

    return several


def jump(name: str, make: MakeSchedule) -> Case:
    """A step of a schedule that follows from its position."""
    work = Work(partial(scheduled, make))
    return Case("schedules", name, "CPU us", "ours", 10.0, work, SCHEDULES, SCHEDULED)


def walk(name: str, make: MakeSchedule) -> Case:
    """A step of another schedule, which takes all of its own steps."""
    work = Work(partial(scheduled, make), raw=partial(plainly_scheduled, make))
    title = f"{name}, against 1024 plain steps"
    return Case("schedules", title, "CPU us", "ours/raw", 1.1, work, SCHEDULES, SCHEDULED)


# ---------------------------------------------------------------- logging
VALUES = {f"metric_{number}": 0.1 * number + 1 / 3 for number in range(20)}


def log(scope: Scope) -> Call:
    """Lines of numbers through the tracker."""
    accelerator = scope.library("accel_torch").Accelerator(cpu=True, log_with="jsonl", project_dir=scope.folder)
    accelerator.init_trackers("run")

    def lines() -> None:
        for step in range(LOGGED):
            accelerator.log(VALUES, step=step)

    return lines


def write(scope: Scope) -> Call:
    """The same lines written plainly."""
    file = os.open(scope.folder / "raw.jsonl", os.O_WRONLY | os.O_CREAT)

    def lines() -> None:
        for step in range(LOGGED):
            line = {"step": step, "time": round(time.time(), 3), "values": VALUES}
            os.write(file, (json.dumps(line) + "\n").encode())

    return lines


# ---------------------------------------------------------------- replicas
def replicas(every: int | None, scope: Scope) -> Call:
    """Steps of a model on several processes, whose replicas are compared now and then."""
    import torch

    settings = {} if every is None else {"check_replicas_every": every}
    accelerator = scope.library("accel_torch").Accelerator(cpu=True, **settings)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(128, 128), torch.nn.ReLU())]
    plain = torch.nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.001))
    inputs = torch.randn(16, 128)

    def steps() -> None:
        for _ in range(STEPS):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return steps


# ---------------------------------------------------------------- looking at a run from outside
def looked_at(scope: Scope) -> Call:
    """Steps of a process that says where it is, as those of `accel launch` do."""
    from accel_state.watch.calls import CallLog
    from accel_state.watch.monitor import HangMonitor
    from accel_state.watch.record import STATUS_RECORD

    several = replicas(0, scope)

    def steps() -> None:
        with paused():
            STATUS_RECORD.open(str(scope.folder), int(os.environ["RANK"]))
            monitor = HangMonitor(CallLog(), None, int(os.environ["RANK"]), 1)
            monitor.start()
        several()
        with paused():
            monitor.stop()

    return steps


def not_looked_at(scope: Scope) -> Call:
    """The same steps, of which nobody takes note."""
    from types import SimpleNamespace
    from unittest import mock

    from accel_plugins.wrapped import optimizer as wrapped

    several = replicas(0, scope)
    seen = SimpleNamespace(steps=float("inf"))

    def steps() -> None:
        with paused():
            uncounted = mock.patch.object(wrapped, "STATUS_RECORD", seen)
            uncounted.start()
        several()
        with paused():
            uncounted.stop()

    return steps


# ---------------------------------------------------------------- the account of a run's time
def accounted(keeps: bool, scope: Scope) -> Call:
    """Steps over a prepared loader, with or without an account of their time."""
    import torch

    from accel_torch.hooks import PROCESS_HOOKS

    before = list(PROCESS_HOOKS)
    settings = {"goodput": True, "project_dir": str(scope.folder)} if keeps else {}
    accelerator = scope.library("accel_torch").Accelerator(cpu=True, **settings)
    plain = torch.nn.Linear(1, 1)
    data = torch.zeros(STEPS, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), collate_fn=_first)
    _, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.0), loader)
    # The other side shares this interpreter.
    PROCESS_HOOKS[:] = before

    def steps() -> None:
        for _ in loader:
            optimizer.step()

    return steps


def _first(samples: list[Any]) -> Any:
    return samples[0]


# ---------------------------------------------------------------- sharding
Prepared = tuple[Any, Any, Callable[[Any], object]]
"""Model, optimizer, and how to go backward."""


def blocks() -> tuple[Any, Any]:
    """A model of 200 blocks of a class of their own, and its optimizer."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inwards, self.outwards = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, inputs: Any) -> Any:
            return inputs + self.outwards(self.inwards(inputs).relu())

    model = nn.Sequential(*(Block() for _ in range(200)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@cache
def accelerator_of_shards(scope: Scope) -> Any:
    """The Accelerator that shards each block."""
    library = scope.library("accel_torch")
    plugin = library.FullyShardedDataParallelPlugin(
        2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
    )
    return library.Accelerator(cpu=True, fsdp_plugin=plugin)


def sharded(model: Any, optimizer: Any, scope: Scope) -> Prepared:
    """The model, sharded by the Accelerator."""
    accelerator = accelerator_of_shards(scope)
    return *accelerator.prepare(model, optimizer), accelerator.backward


@cache
def mesh() -> Any:
    """Both processes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (2,))


def plainly_sharded(model: Any, optimizer: Any, scope: Scope) -> Prepared:
    """The same with torch alone."""
    import torch
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model, torch.optim.SGD(model.parameters(), lr=0.01), lambda loss: loss.backward()


Shard = Callable[[Any, Any, Scope], Prepared]


def prepare_shards(shard: Shard, scope: Scope) -> Call:
    """Preparing a fresh model."""

    def prepare() -> None:
        with paused():
            if scope.kind == "ours":
                accelerator_of_shards(scope).free_memory()
            model, optimizer = blocks()
        shard(model, optimizer, scope)

    return prepare


def shard_step(prepared: Prepared) -> Call:
    """A step of training."""
    import torch

    model, optimizer, backward = prepared
    inputs = torch.randn(8, 256)

    def step() -> None:
        backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_shards(shard: Shard, scope: Scope) -> Call:
    """A step of a model that was prepared before."""
    return shard_step(shard(*blocks(), scope))


def train_from_nothing(shard: Shard, scope: Scope) -> Call:
    """Building, preparing and training a model, after all that this needs was imported with a model of one block."""
    import torch

    small = torch.nn.Sequential(type("Block", (torch.nn.Linear,), {})(2, 2))
    shard(small, torch.optim.SGD(small.parameters(), lr=0.01), scope)

    def train() -> None:
        step = train_shards(shard, scope)
        for _ in range(3):
            step()

    return train


def build_in_shards(scope: Scope) -> Call:
    """Building and preparing a model of which each process keeps its shards, after all that this needs was imported."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inwards, self.outwards = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    accelerator = accelerator_of_shards(scope)

    def build(count: int, width: int) -> Any:
        with accelerator.init_module():
            model = nn.Sequential(*(Block(width) for _ in range(count)))
        return accelerator.prepare(model)

    torch.set_num_threads(1)
    build(1, 8)
    return partial(build, 15, 2048)


def sharding(name: str, unit: str, how: Callable[[Shard, Scope], Call], limit: float, once: bool = False) -> Case:
    """A case of sharding."""
    sides: tuple[Side, Side] = (partial(how, sharded), partial(how, plainly_sharded))
    work = Work(sides[0], raw=sides[1], processes=2, once=once, rounds=6)
    return Case("sharding", f"FSDP2 {name}, 200 blocks, 2 processes", unit, "ours/raw", limit, work, SHARDING)


US: Final = "CPU us per step"
LOGS: Final = Work(log, raw=write)
COMPARED: Final = (Work(partial(replicas, 100), raw=partial(replicas, None), processes=2), WATCHING)
OPEN: Final = (Work(looked_at, raw=not_looked_at, processes=2), LOOKED_AT)
COUNTED: Final = (Work(partial(accounted, True), raw=partial(accounted, False)), ACCOUNTED)
WATCHED: Final = partial(Case, "watching", per=STEPS)

CASES: Final = (
    *steps("full precision, accumulation 1", "no", 1, 6.0),
    *steps("full precision, accumulation 4", "no", 4, 6.0),
    *steps("bf16, accumulation 1", "bf16", 1, 12.0),
    jump("LambdaLR", lambda k, o: k.LambdaLR(o, lambda step: 1 / (1 + step))),
    jump("OneCycleLR", lambda k, o: k.OneCycleLR(o, 0.1, total_steps=HORIZON + 1)),
    jump("CyclicLR", lambda k, o: k.CyclicLR(o, 0.01, 0.1, step_size_up=500, cycle_momentum=False)),
    jump("CosineAnnealingWarmRestarts", lambda k, o: k.CosineAnnealingWarmRestarts(o, 300)),
    walk("StepLR", lambda k, o: k.StepLR(o, EVERY, 0.999)),
    walk("MultiStepLR", lambda k, o: k.MultiStepLR(o, list(range(EVERY, HORIZON, EVERY)), 0.999)),
    walk("ConstantLR", lambda k, o: k.ConstantLR(o, 0.5, 5000)),
    walk("CosineAnnealingLR", lambda k, o: k.CosineAnnealingLR(o, HORIZON)),
    walk("ExponentialLR", lambda k, o: k.ExponentialLR(o, 0.99999)),
    walk("LinearLR", lambda k, o: k.LinearLR(o, 0.5, total_iters=HORIZON)),
    walk("PolynomialLR", lambda k, o: k.PolynomialLR(o, HORIZON, 2.0)),
    Case("tracking", "log of 20 numbers as a JSON line", "CPU us", "ours/raw", 2.0, LOGS, LOGGING, LOGGED),
    WATCHED("a step with replicas compared every 100 steps, 2 processes", "wall ms", "ours/raw", 1.01, *COMPARED),
    WATCHED("a step that can be looked at from outside, 2 processes", US, "ours/raw", 1.01, *OPEN),
    WATCHED("a step whose time is accounted for (goodput)", US, "ours - raw", 1.0, *COUNTED),
    sharding("prepare", "CPU ms", prepare_shards, 1.3),
    sharding("training step", "CPU ms", train_shards, 1.0),
    sharding("peak memory", "MB", train_from_nothing, 1.0, once=True),
    Case(
        "sharding",
        "FSDP2 init_module and prepare of a model of 2 GB, 2 processes: peak memory",
        *("MB", "ours", 1208.0, Work(build_in_shards, processes=2, once=True), BUILDING),
    ),
)
