"""Methods of the Accelerator around a training step: what each changes, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accel_ops import gather
from accel_testing.processes import Processes
from accel_torch import Accelerator, GradScalerKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")


def model_with_optimizer(accelerator: Accelerator, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared: tuple[nn.Module, torch.optim.Optimizer] = accelerator.prepare(model, optimizer)
    return prepared


def test_a_scheduler_prepared_by_its_own_method_steps_with_its_optimizer_alone() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = model_with_optimizer(accelerator)
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    rates = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.25, 0.125]


def test_gradients_of_one_of_two_optimizers_are_unscaled() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    first, first_optimizer = model_with_optimizer(accelerator)
    second, _ = model_with_optimizer(accelerator)
    for model in (first, second):
        accelerator.backward(model(torch.ones(2, 3)).sum())
    accelerator.unscale_gradients(first_optimizer)
    assert torch.equal(gradient(first), torch.full((1, 3), 2.0))
    assert torch.equal(gradient(second), torch.full((1, 3), 8.0))
    accelerator.unscale_gradients()
    assert torch.equal(gradient(second), torch.full((1, 3), 2.0))


def gradient(model: nn.Module) -> Tensor:
    found = next(model.parameters()).grad
    assert found is not None
    return found


def test_a_skipped_step_of_one_of_two_optimizers_is_reported() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    pairs = [model_with_optimizer(accelerator, seed) for seed in range(2)]
    for (model, optimizer), size in zip(pairs, (1.0, float("inf")), strict=True):
        accelerator.backward(model(torch.full((1, 3), size)).sum())
        optimizer.step()
    assert [optimizer.step_was_skipped for _, optimizer in pairs] == [False, True]  # type: ignore[attr-defined]
    assert accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("cached", [False, True])
def test_a_bool_in_place_of_the_handler_of_autocast_decides_about_the_cache_of_weights(cached: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast(cached):
        assert torch.is_autocast_cache_enabled() is cached
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16


def test_an_unwrapped_model_keeps_its_forward_in_the_precision_of_the_run_unless_told_otherwise() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    seen: list[torch.dtype] = []

    linear = nn.Linear(3, 1)
    linear.register_forward_hook(lambda module, inputs, output: seen.append(torch.mm(output, output).dtype))
    model = accelerator.prepare(nn.Sequential(linear))
    accelerator.unwrap_model(model)(torch.ones(1, 3))
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)(torch.ones(1, 3))
    assert seen == [torch.bfloat16, torch.float32]


def test_a_window_of_micro_batches_begins_anew_after_memory_was_freed() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _ = model_with_optimizer(accelerator)
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients
    accelerator.free_memory()
    model, _ = model_with_optimizer(accelerator)
    assert accelerator.step == 0
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients


def gradients_after_each_micro_batch() -> list[bool]:
    """Whether both processes hold equal gradients, after each of two micro-batches with weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _ = model_with_optimizer(accelerator)
    equal = []
    for _ in range(2):
        with accelerator.accumulate(model, weight=2):
            accelerator.backward(model(torch.full((2, 3), 1.0 + accelerator.process_index)).mean())
            every: Tensor = gather(gradient(model)[None])
            equal.append(bool((every == every[0]).all()))
    return equal


def test_gradients_of_weighted_micro_batches_are_exchanged_at_the_end_of_their_window_alone(two: Processes) -> None:
    assert two.run(gradients_after_each_micro_batch) == [[False, True]] * 2


def test_clipping_values_without_gradients_changes_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = model_with_optimizer(accelerator)
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    accelerator.clip_grad_value_([], 1.0)
    assert all(parameter.grad is None for parameter in model.parameters())
