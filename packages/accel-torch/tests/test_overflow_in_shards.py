"""fp16 on several axes: all processes skip the same steps and keep the same scale, wherever a gradient overflows."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from accel_testing.backends.reference_loop import near as near_to
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)

pytestmark = pytest.mark.usefixtures("fresh_state")

STEPS, SCALE = 5, 1024.0
OVERFLOWS = 1
"""The step at which one process has an overflow."""

near = partial(near_to, rel=2e-2, abs=2e-3)


class Net(nn.Module):
    """Its first and its last parameters are outside of the tensor-parallel plan, as embeddings, norms and heads are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.tanh(self.up(inputs * self.scale)))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :2].sin()


def full(tensor: torch.Tensor) -> list[Any]:
    tensor = tensor.detach()
    values: list[Any] = getattr(tensor, "full_tensor", lambda: tensor)().tolist()
    return values


def local(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    shard: torch.Tensor = getattr(gradient, "to_local", lambda: gradient)()
    return shard


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"parallelism_config": {"tp_size": 2}}),
    "dp_shard x tp": (4, {"parallelism_config": {"dp_shard_size": 2, "tp_size": 2}, "fsdp": {}}),
    "hsdp": (4, {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}, "fsdp": {}}),
    "fsdp2": (2, {"fsdp": {}}),
    "fsdp2, first module ignored": (2, {"fsdp": {"ignored_modules": "up"}}),
    "fsdp2, last module ignored": (2, {"fsdp": {"ignored_modules": "head"}}),
    "fsdp1": (2, {"fsdp": {"fsdp_version": 1}}),
    "fsdp1, module ignored": (2, {"fsdp": {"fsdp_version": 1, "ignored_modules": "head"}}),
    "ddp": (2, {}),
}


def accelerator_of(layout: str, **options: Any) -> Accelerator:
    given = dict(LAYOUTS[layout][1])
    if "parallelism_config" in given:
        given["parallelism_config"] = ParallelismConfig(**given["parallelism_config"])
    if "tp" in layout:
        given["torch_tp_plugin"] = TorchTensorParallelPlugin(parallelize_plan={"up": "colwise", "down": "rowwise"})
    if (settings := given.pop("fsdp", None)) is not None:
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            **{"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP", **settings}
        )
    scaling = GradScalerKwargs(init_scale=SCALE, growth_interval=2)
    return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling], **given, **options)


def groups_of(model: nn.Module, optimizers: int) -> list[list[nn.Parameter]]:
    parameters = list(model.parameters())
    # The second optimizer has what no plan shards.
    return [parameters] if optimizers == 1 else [parameters[:-4], parameters[-4:]]


def optimizer_of(parameters: list[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
    # torch supports a fused SGD of plain tensors only.
    if fused:
        return torch.optim.Adam(parameters, lr=0.02, eps=0.1, fused=True)
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def train(
    layout: str, where: str, rank: int, clip: str = "", fused: bool = False, optimizers: int = 1
) -> dict[str, Any]:
    """Train, with an overflow on one process only, in the gradient of one parameter, at one step."""
    accelerator = accelerator_of(layout)
    model = net()
    made = [optimizer_of(group, fused) for group in groups_of(model, optimizers)]
    prepared, *steppers = accelerator.prepare(model, *made)
    reads = accelerator.num_processes if "tp" not in layout else accelerator.num_processes // 2
    index = accelerator.process_index if "tp" not in layout else accelerator.process_index // 2
    skipped, scales, norms = [], [], []
    for step in range(STEPS):
        inputs, targets = (part.chunk(reads)[index] for part in batch(step))
        accelerator.backward(nn.functional.mse_loss(prepared(inputs), targets))
        parameters = dict(accelerator.unwrap_model(prepared).named_parameters())
        if step == OVERFLOWS and accelerator.process_index == rank:
            local(parameters[where].grad).view(-1)[:1] = math.inf
        if clip == "norm":
            norm = float(accelerator.clip_grad_norm_(prepared.parameters(), 0.1))
            norms += [norm] if step != OVERFLOWS else []
        elif clip == "value":
            accelerator.clip_grad_value_(prepared.parameters(), 0.01)
        for stepper in steppers:
            stepper.step()
        for stepper in steppers:
            stepper.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        assert accelerator.scaler is not None
        scales.append(accelerator.scaler.get_scale())
    weights = accelerator.get_state_dict(prepared)
    return {
        "skipped": skipped,
        "scales": scales,
        "norms": norms,
        "weights": {name: full(value) for name, value in weights.items()} if weights else None,
        "whole": {
            name: full(value)
            for name, value in accelerator.unwrap_model(prepared).named_parameters()
            if not (layout.startswith("fsdp1") or hasattr(value, "placements"))
        },
    }


def reference(clip: str = "", fused: bool = False, optimizers: int = 1) -> dict[str, Any]:
    """The same training in one process, in plain torch and fp16."""
    model = net()
    steppers = [optimizer_of(group, fused) for group in groups_of(model, optimizers)]
    norms = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        (SCALE * nn.functional.mse_loss(outputs.float(), targets)).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(SCALE)
        if step != OVERFLOWS and clip == "norm":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        elif clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for stepper in steppers if step != OVERFLOWS else steppers[1:]:
            stepper.step()
        for stepper in steppers:
            stepper.zero_grad()
    return {"norms": norms, "weights": {name: full(value) for name, value in model.named_parameters()}}


def local_and_partial() -> dict[str, Any]:
    """Clip the values of gradients of which each process has a partial sum."""
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(tp_size=2),
        torch_tp_plugin=TorchTensorParallelPlugin(parallelize_plan=plan),
    )
    model = accelerator.prepare(net())
    inputs, targets = (part.unflatten(0, (2, 4)) for part in batch(0))
    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
    kinds = {type(placement).__name__ for placement in model.norm.weight.grad.placements}
    accelerator.clip_grad_value_(model.parameters(), 0.05)
    return {"kinds": kinds, "gradients": {name: full(value.grad) for name, value in model.named_parameters()}}


def test_values_of_partial_sums_are_clipped_as_their_sum(two: Processes) -> None:
    model = net()
    inputs, targets = (part.unflatten(0, (2, 4)) for part in batch(0))
    nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    expected = {name: full(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    for answer in two.run(local_and_partial):
        assert answer["kinds"] == {"Partial"}
        assert answer["gradients"] == near_to(expected, rel=1e-4, abs=1e-6)


def check(answers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for answer in answers:
        assert answer["skipped"] == [step == OVERFLOWS for step in range(STEPS)]
        assert answer["scales"] == [SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE]
        assert answer["norms"] == near(expected["norms"])
        assert answer["whole"] == answers[0]["whole"]
    for weights in (answer["weights"] for answer in answers if answer["weights"]):
        assert weights == near(expected["weights"])


@pytest.mark.parametrize(
    ("where", "clip"), [("scale", ""), ("up.weight", ""), ("up.weight", "norm"), ("scale", "value")]
)
@pytest.mark.parametrize("layout", ["tp", "dp_shard x tp"])
def test_processes_skip_together_when_one_shard_overflows(
    request: pytest.FixtureRequest, layout: str, where: str, clip: str
) -> None:
    group: Processes = request.getfixturevalue("two" if LAYOUTS[layout][0] == 2 else "four")
    check(group.run(train, layout, where, 1, clip), reference(clip))


@pytest.mark.parametrize(
    ("layout", "where", "fused"),
    [
        ("fsdp2", "up.weight", False),
        ("fsdp2", "up.weight", True),
        ("fsdp2, first module ignored", "down.weight", False),
        ("fsdp2, last module ignored", "down.weight", False),
        ("fsdp2, last module ignored", "head.weight", False),
        ("fsdp1", "up.weight", False),
        ("fsdp1", "up.weight", True),
        ("fsdp1, module ignored", "up.weight", True),
        ("fsdp1, module ignored", "head.weight", False),
    ],
)
def test_processes_of_data_parallelism_skip_together(two: Processes, layout: str, where: str, fused: bool) -> None:
    check(two.run(train, layout, where, 0, "norm", fused), reference("norm", fused))


@pytest.mark.parametrize("rank", [0, 3])
def test_replicas_of_groups_skip_together(four: Processes, rank: int) -> None:
    check(four.run(train, "hsdp", "down.weight", rank, "norm"), reference("norm"))


@pytest.mark.parametrize("fused", [False, True])
def test_one_of_several_optimizers_skips_on_all_processes(four: Processes, fused: bool) -> None:
    answers = four.run(train, "dp_shard x tp", "up.weight", 2, "", fused, 2)
    check(answers, reference(fused=fused, optimizers=2))


# ----------------------------------------------------------------- processes without gradients, other scalers


def train_where_one_process_has_all(layout: str, clip: bool) -> dict[str, Any]:
    """Train the last parameters only, of which a process has no element."""
    accelerator = accelerator_of(layout)
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "head.bias")
    optimizer = torch.optim.SGD([model.head.bias], lr=0.05)
    prepared, stepper = accelerator.prepare(model, optimizer)
    skipped = []
    for step in range(STEPS):
        inputs, targets = (part.chunk(2)[accelerator.process_index] for part in batch(step))
        loss = nn.functional.mse_loss(prepared(inputs), targets)
        accelerator.backward(loss * (math.inf if step == OVERFLOWS else 1.0))
        if clip:
            accelerator.unscale_gradients()
        stepper.step()
        stepper.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert accelerator.scaler is not None
    return {"skipped": skipped, "scale": accelerator.scaler.get_scale()}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_a_process_without_gradients_skips_with_the_others(two: Processes, layout: str, clip: bool) -> None:
    expected = {"skipped": [step == OVERFLOWS for step in range(STEPS)], "scale": SCALE}
    assert two.run(train_where_one_process_has_all, layout, clip, timeout=60) == [expected] * 2


def assign_and_train() -> dict[str, Any]:
    accelerator = accelerator_of("tp")
    model = net()
    prepared, stepper = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inputs, targets = batch(0)
    accelerator.backward(nn.functional.mse_loss(prepared(inputs), targets))
    if accelerator.process_index:
        local(prepared.up.weight.grad)[0, 0] = math.inf
    stepper.step()
    skipped = accelerator.optimizer_step_was_skipped
    scaler = accelerator.scaler
    state = copy.deepcopy(scaler.state_dict())
    accelerator.session.precision.load_state_dict({**state, "scale": 2.0})
    return {
        "skipped": skipped,
        "scale": state["scale"],
        "loaded": accelerator.scaler.get_scale(),
        "same": stepper.scaler is accelerator.scaler,
    }


def test_an_assigned_scaler_decides_for_all_processes_too(two: Processes) -> None:
    assert two.run(assign_and_train) == [{"skipped": True, "scale": 4.0, "loaded": 2.0, "same": True}] * 2


def accumulate_under_ddp() -> dict[str, Any]:
    """An overflow on one process, in a micro-batch whose gradients are not synchronised."""
    accelerator = accelerator_of("ddp", gradient_accumulation_steps=2)
    model = net()
    prepared, stepper = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    skipped = []
    for step in range(6):
        inputs, targets = batch(step)
        with accelerator.accumulate(prepared):
            loss = nn.functional.mse_loss(prepared(inputs), targets)
            accelerator.backward(loss * (math.inf if (step, accelerator.process_index) == (2, 1) else 1.0))
            stepper.step()
            stepper.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
    assert accelerator.scaler is not None
    return {"skipped": skipped, "scale": accelerator.scaler.get_scale()}


def test_replicas_skip_together_when_one_micro_batch_overflows(two: Processes) -> None:
    assert two.run(accumulate_under_ddp) == [{"skipped": [False, True, False], "scale": SCALE / 2}] * 2
