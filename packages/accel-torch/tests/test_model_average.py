"""`ModelAverage` against torch's `AveragedModel` in one process, on every layout."""

from __future__ import annotations

import copy
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_state.errors import CheckpointError, Conflict, NotOffered, NotReady, SettingError
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ModelAverage,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)

DECAY = 0.8
STEPS = 6
PLAN = {"1": "colwise", "3": "rowwise"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp": {"fsdp_version": 1}},
    "ddp": {},
    "fsdp2": {"fsdp": True},
    "fsdp2 unsharded after forward": {"fsdp": {"reshard_after_forward": False}},
    "fsdp2 full": {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}},
    "hybrid": {"fsdp": True, "axes": {"dp_replicate_size": 2, "dp_shard_size": 2}},
    "fsdp2 x tp": {"fsdp": True, "axes": {"dp_shard_size": 2, "tp_size": 2}},
}


def accelerator_for(layout: str, **options: Any) -> Accelerator:
    chosen = LAYOUTS[layout]
    if (settings := chosen.get("fsdp")) is not None:
        settings = {"fsdp_version": 2, **(settings if isinstance(settings, dict) else {})}
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(**settings)
    if (axes := chosen.get("axes")) is not None:
        options["parallelism_config"] = ParallelismConfig(**axes)
        if "tp_size" in axes:
            options["torch_tp_plugin"] = TorchTensorParallelPlugin(parallelize_plan=PLAN)
    return Accelerator(cpu=True, **options)


def network() -> nn.Module:
    torch.manual_seed(0)
    # Five rows are uneven over two and three processes.
    return nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def expected(steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The averages of torch's class in one process."""
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return dict(average.module.state_dict())


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        accelerator.backward(model(batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def near(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.allclose(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name]), rtol=1e-6, atol=1e-6)
        for name in ours
    )


def averaged(layout: str, folder: str) -> tuple[Any, Any, Any, bool]:
    accelerator = accelerator_for(layout)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    average = ModelAverage(model, DECAY)
    train(accelerator, model, optimizer, range(STEPS))
    before = accelerator.get_state_dict(model)
    before = {name: value.clone() for name, value in before.items()}
    with torch.no_grad():
        own = model(batch(0))
        with average.applied():
            evaluated = model(batch(0))
            weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
            accelerator.save_model(model, folder)
        again = model(batch(0))
    after = accelerator.get_state_dict(model)
    same = all(torch.equal(before[name], after[name]) for name in before) and torch.equal(own, again)
    return (
        {name: value.tolist() for name, value in weights.items()},
        evaluated.tolist(),
        own.tolist(),
        same,
    )


def check(answers: list[Any], folder: Path) -> None:
    from safetensors.torch import load_file

    wanted = expected()
    reference = network()
    reference.load_state_dict(wanted)
    with torch.no_grad():
        outputs = reference(batch(0))
    assert near(answers[0][0], wanted)
    assert near(load_file(folder / "model.safetensors"), wanted)
    for _, evaluated, own, same in answers:
        assert torch.allclose(torch.tensor(evaluated), outputs, atol=1e-5)
        assert not torch.allclose(torch.tensor(evaluated), torch.tensor(own), atol=1e-4)
        assert same


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2", "fsdp2 unsharded after forward", "fsdp2 full"])
def test_two_processes_average_as_torch_does_in_one(two: Processes, layout: str, tmp_path: Path) -> None:
    check(two.run(averaged, layout, str(tmp_path)), tmp_path)


@pytest.mark.usefixtures("fresh_state")
def test_three_processes_with_uneven_shards_average_as_torch_does_in_one(three: Processes, tmp_path: Path) -> None:
    check(three.run(averaged, "fsdp2", str(tmp_path)), tmp_path)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("layout", ["hybrid", "fsdp2 x tp"])
def test_four_processes_on_a_mesh_average_as_torch_does_in_one(four: Processes, layout: str, tmp_path: Path) -> None:
    check(four.run(averaged, layout, str(tmp_path)), tmp_path)


# ---------------------------------------------------------------------- checkpoints


def save(layout: str, folder: str) -> None:
    accelerator = accelerator_for(layout)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    average = ModelAverage(model, DECAY)
    train(accelerator, model, optimizer, range(STEPS // 2))
    accelerator.save_state(folder)
    with average.applied(), pytest.raises(NotReady, match="outside of the block"):
        accelerator.save_state(folder + "-never")


def resume(layout: str, folder: str, again: str = "", first: int = STEPS // 2, steps: int = STEPS) -> dict[str, Any]:
    accelerator = accelerator_for(layout)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    average = ModelAverage(model, DECAY)
    accelerator.load_state(folder, allow_missing=("random_states",))
    assert (average.steps, average.updates) == (first, first)
    if again:
        accelerator.save_state(again)
    train(accelerator, model, optimizer, range(first, steps))
    with average.applied():
        return {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.usefixtures("fresh_state")
def test_an_average_is_resumed_on_other_numbers_of_processes_and_backends(two: Processes, tmp_path: Path) -> None:
    sharded, whole, replicated = (str(tmp_path / name) for name in ("sharded", "whole", "replicated"))
    two.run(save, "fsdp2", sharded)
    assert near(resume("ddp", sharded, again=whole), expected())
    assert near(two.run(resume, "ddp", whole, replicated)[0], expected())
    assert near(two.run(resume, "fsdp2", replicated)[0], expected())


@pytest.mark.usefixtures("fresh_state")
def test_an_average_in_shards_is_resumed_on_three_processes(two: Processes, three: Processes, tmp_path: Path) -> None:
    two.run(save, "fsdp2", str(tmp_path / "saved"))
    assert near(three.run(resume, "fsdp2", str(tmp_path / "saved"))[0], expected())


@pytest.mark.usefixtures("fresh_state")
def test_a_resumed_average_is_equal_to_the_bit(tmp_path: Path) -> None:
    save("ddp", str(tmp_path / "saved"))
    resumed = resume("ddp", str(tmp_path / "saved"))
    assert resumed == {name: value.tolist() for name, value in expected().items()}


@pytest.mark.usefixtures("fresh_state")
def test_a_background_save_has_the_average_and_the_weights(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, average = alone(accelerator)
    train(accelerator, model, optimizer, range(3))
    with average.applied():
        averaged = copy.deepcopy(model.state_dict())
    weights = copy.deepcopy(model.state_dict())
    accelerator.save_state(tmp_path / "saved", async_save=True)
    with average.applied():
        model(batch(0))
    train(accelerator, model, optimizer, range(3, STEPS))
    accelerator.wait_for_checkpoint()
    accelerator.load_state(tmp_path / "saved")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with average.applied():
        assert all(torch.equal(value, averaged[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("fresh_state")
def test_a_checkpoint_without_the_average_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(tmp_path / "saved")
    average = ModelAverage(model)
    with pytest.raises(CheckpointError, match="after load_state"):
        accelerator.load_state(tmp_path / "saved")
    del average
    gc.collect()
    accelerator.load_state(tmp_path / "saved")


# ---------------------------------------------------------------------- what an update is


def alone(accelerator: Accelerator, **options: Any) -> tuple[Any, Any, ModelAverage]:
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return model, optimizer, ModelAverage(model, DECAY, **options)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize(("every", "start", "updated"), [(1, 0, [1, 2, 3, 4, 5, 6]), (2, 1, [3, 5]), (3, 0, [3, 6])])
def test_every_and_start_count_optimizer_steps(every: int, start: int, updated: list[int]) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, average = alone(accelerator, every=every, start=start)
    seen: list[int] = []
    for step in range(2 * STEPS):
        before = average.updates
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if average.updates > before:
            seen.append(average.steps)
    assert seen == updated


@pytest.mark.usefixtures("fresh_state")
def test_the_first_update_copies_and_before_it_the_model_is_evaluated_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, average = alone(accelerator, start=1)
    initial = copy.deepcopy(model.state_dict())
    with average.applied():
        assert all(torch.equal(value, initial[name]) for name, value in model.state_dict().items())
    train(accelerator, model, optimizer, range(2))
    second = copy.deepcopy(model.state_dict())
    train(accelerator, model, optimizer, range(2, 3))
    assert average.updates == 2
    with average.applied():
        third = copy.deepcopy(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(third[name], DECAY * second[name] + (1 - DECAY) * value, atol=1e-6)


@pytest.mark.usefixtures("fresh_state")
def test_a_skipped_step_updates_nothing() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = ModelAverage(model)
    accelerator.backward(model(batch(0)).square().mean() * float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert (average.steps, average.updates) == (0, 0)


@pytest.mark.usefixtures("fresh_state")
def test_several_optimizers_of_a_model_make_one_update() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD([*model[1].parameters(), *model[3].parameters()], lr=0.1)
    other = nn.Linear(1, 1)
    third = torch.optim.SGD(other.parameters(), lr=0.1)
    model, other, first, second, third = accelerator.prepare(model, other, first, second, third)
    average = ModelAverage(model)
    updates = []
    accelerator.backward(model(batch(0)).square().mean() + other(torch.ones(1, 1)).sum())
    for optimizer in (third, first, second, first, third, second):
        optimizer.step()
        updates.append(average.updates)
    assert updates == [0, 0, 1, 1, 1, 2]


@pytest.mark.usefixtures("fresh_state")
def test_update_by_hand() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, average = alone(accelerator, automatic=False)
    train(accelerator, model, optimizer, range(2))
    assert average.updates == 0
    average.update()
    assert (average.steps, average.updates) == (1, 1)
    with pytest.raises(Conflict, match="automatic=False"):
        ModelAverage(model).update()


@pytest.mark.usefixtures("fresh_state")
def test_buffers_are_copied_and_frozen_parameters_stay() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model[1].register_buffer("scratch", torch.zeros(1), persistent=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = ModelAverage(model, DECAY)
    train(accelerator, model, optimizer, range(2))
    mean = model[1].running_mean.clone()
    model(batch(9))
    model[1].scratch += 1
    assert not torch.equal(mean, model[1].running_mean)
    with average.applied():
        assert torch.equal(mean, model[1].running_mean)
        assert model[1].scratch == 1
        assert model[1].num_batches_tracked == 2
    assert model[1].num_batches_tracked == 3
    # A parameter that begins to train later joins with its own value.
    model[0].requires_grad_(True)
    accelerator.backward(model(batch(3)).sum())
    optimizer.step()
    weight = model[0].weight.clone()
    with average.applied():
        assert torch.equal(weight, model[0].weight)


@pytest.mark.usefixtures("fresh_state")
def test_an_average_on_another_device_is_equal() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, average = alone(accelerator, device="cpu")
    train(accelerator, model, optimizer, range(STEPS))
    with average.applied():
        assert near(dict(model.state_dict()), expected())


@pytest.mark.usefixtures("fresh_state")
def test_no_step_and_no_second_exchange_inside_the_block() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, average = alone(accelerator)
    train(accelerator, model, optimizer, range(2))
    own = copy.deepcopy(model.state_dict())
    with average.applied():
        averaged = copy.deepcopy(model.state_dict())
        with average.applied():
            pass
        assert all(torch.equal(value, averaged[name]) for name, value in model.state_dict().items())
        accelerator.backward(model(batch(0)).sum())
        with pytest.raises(NotReady, match="step an optimizer inside"):
            optimizer.step()
    with pytest.raises(ZeroDivisionError), average.applied():
        raise ZeroDivisionError
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("fresh_state")
def test_an_average_that_nobody_keeps_leaves_the_session() -> None:
    accelerator = Accelerator(cpu=True)
    session = accelerator.session
    model, optimizer, average = alone(accelerator)
    entered = len(session.hooks.after_step)
    assert session.prepared.save_hooks
    del average
    gc.collect()
    assert len(session.hooks.after_step) == entered - 1
    assert not session.prepared.save_hooks
    train(accelerator, model, optimizer, range(1))


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("wrong", [{"decay": 1.5}, {"decay": -0.1}, {"every": 0}, {"start": -1}])
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    model = Accelerator(cpu=True).prepare(network())
    with pytest.raises(SettingError, match=next(iter(wrong))):
        ModelAverage(model, **wrong)


@pytest.mark.usefixtures("fresh_state")
def test_a_model_that_was_not_prepared_is_refused() -> None:
    Accelerator(cpu=True)
    with pytest.raises(NotReady, match="after prepare"):
        ModelAverage(network())


@pytest.mark.usefixtures("fresh_state")
def test_coarse_weights_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model = network().to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = ModelAverage(model)
    with caplog.at_level(logging.WARNING):
        accelerator.backward(model(batch(0).bfloat16()).square().mean())
        optimizer.step()
    assert average.updates == 1
    assert "bfloat16" in caplog.text


# ---------------------------------------------------------------------- averages of others


def other_averages() -> tuple[str, dict[str, Any]]:
    accelerator = accelerator_for("fsdp2")
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    with pytest.raises(NotOffered) as caught:
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    # As diffusers does: shadows of the parameters, which `fully_shard` has made DTensors.
    shadows: list[Any] = []
    for step in range(STEPS):
        train(accelerator, model, optimizer, range(step, step + 1))
        if step == 0:
            shadows = [parameter.clone().detach() for parameter in model.parameters()]
            continue
        for shadow, parameter in zip(shadows, model.parameters(), strict=True):
            shadow.sub_((1 - DECAY) * (shadow - parameter.detach()))
    names = [name for name, _ in model.named_parameters()]
    full = {name: shadow.full_tensor() for name, shadow in zip(names, shadows, strict=True)}
    return str(caught.value), {name: value.tolist() for name, value in full.items()}


@pytest.mark.usefixtures("fresh_state")
def test_averages_of_other_libraries_on_a_sharded_model_are_right_or_refused(two: Processes) -> None:
    for message, shadows in two.run(other_averages):
        assert "ModelAverage(model)" in message
        assert near(shadows, expected())
