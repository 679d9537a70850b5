"""Local SGD, late synchronisation, and what else a training loop asks the Accelerator for, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_state.errors import NotOffered, SettingError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, LocalSGD


def one_weight(accelerator: Accelerator, rate: float = 1.0) -> tuple[nn.Module, nn.Linear, Any]:
    plain = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(plain.weight)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=rate))
    return model, plain, optimizer


def by_itself(steps: int, every: int, enabled: bool, accumulation: int) -> list[float]:
    """The weight after each micro-batch; process r pulls it down by r + 1."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, plain, optimizer = one_weight(accelerator)
    seen = []
    with LocalSGD(accelerator, model, every, enabled) as local_sgd:
        for _ in range(steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            seen.append(plain.weight.item())
    return [*seen, plain.weight.item()]


def test_parameters_are_averaged_every_so_many_steps_and_at_the_end(two: Processes) -> None:
    first, second = two.run(by_itself, 3, 2, True, 1)
    assert first == [-1.0, -3.0, -4.0, -4.5]
    assert second == [-2.0, -3.0, -5.0, -4.5]


def test_steps_are_those_of_the_optimizer(two: Processes) -> None:
    first, second = two.run(by_itself, 4, 1, True, 2)
    assert first == second == [0.0, -1.5, -1.5, -3.0, -3.0]


def test_disabled_it_trains_as_without(two: Processes) -> None:
    first, second = two.run(by_itself, 2, 2, False, 1)
    assert first == second == [-1.5, -3.0, -3.0]


def travels_nothing() -> list[str]:
    accelerator = Accelerator(cpu=True)
    model, _, optimizer = one_weight(accelerator)
    with recording() as records, LocalSGD(accelerator, model, 100) as local_sgd:
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            local_sgd.step()
    return [record.operation for record in records]


def test_only_averages_travel(two: Processes) -> None:
    assert len(two.run(travels_nothing)[0]) == 1


def fail_inside() -> str:
    accelerator = Accelerator(cpu=True)
    model, _, _ = one_weight(accelerator)
    with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, 1):
        raise ZeroDivisionError
    accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
    return str(next(model.parameters()).grad)


def test_after_an_error_gradients_are_synchronised_again(two: Processes) -> None:
    assert two.run(fail_inside) == ["tensor([[1.5000]])"] * 2


def with_shards() -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2))
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(NotOffered) as caught:
        LocalSGD(accelerator, model, 2)
    LocalSGD(accelerator, model, 2, enabled=False)
    return str(caught.value)


def test_shards_cannot_be_averaged(two: Processes) -> None:
    assert "a different shard of them" in two.run(with_shards)[0]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(steps: Any) -> None:
    with fresh(), pytest.raises(SettingError, match="at least 1"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), steps)


def test_one_process_has_nothing_to_average() -> None:
    with fresh():
        assert by_itself(2, 1, True, 1) == [-1.0, -2.0, -2.0]


# ------------------------------------------------------------------------- late synchronisation


def late(backend: str) -> tuple[float, float]:
    """The gradient after a forward without synchronisation, and after one more whose backward synchronises."""
    plugin = FullyShardedDataParallelPlugin(2) if backend == "fsdp2" else None
    accelerator = Accelerator(cpu=True, backend=backend, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    mine = torch.full((1, 1), accelerator.process_index + 1.0)
    with accelerator.no_sync(model):
        first, second = model(mine).sum(), model(mine * 10).sum()
        accelerator.backward(first)
    held = next(model.parameters()).grad
    before = float("nan") if held is None else held.item()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    after: Any = next(model.parameters()).grad
    after = after.full_tensor() if hasattr(after, "full_tensor") else after
    return before, after.item()


def test_gradients_of_earlier_micro_batches_are_synchronised_late(two: Processes) -> None:
    first, second = two.run(late, "ddp")
    assert (first[0], second[0]) == (1.0, 2.0)
    assert (first[1], second[1]) == (16.5, 16.5)


def test_shards_are_synchronised_late(two: Processes) -> None:
    first, second = two.run(late, "fsdp2")
    assert (first[1], second[1]) == (16.5, 16.5)


# -------------------------------------------------------------------------------- clipping and steps


def clip_by_value(backend: str) -> list[float]:
    plugin = FullyShardedDataParallelPlugin(2) if backend == "fsdp2" else None
    accelerator = Accelerator(cpu=True, backend=backend, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Linear(3, 1, bias=False))
    pull = torch.tensor([[0.1, -5.0, 3.0]]) * (accelerator.process_index + 1)
    accelerator.backward(model(pull).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    gradient: Any = next(model.parameters()).grad
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return [float(value) for value in gradient.flatten()]


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_each_element_is_clipped_after_averaging(two: Processes, backend: str) -> None:
    for clipped in two.run(clip_by_value, backend):
        assert clipped == pytest.approx([0.15, -0.5, 0.5])


def overflow_on_one() -> list[tuple[bool, bool, float]]:
    """After each of two steps, the first of which overflows on the last process: skipped, weight unchanged, rate."""
    from accel_torch import GradScalerKwargs

    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    model, plain, optimizer = one_weight(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5**step))
    told = []
    for factor in (float("inf") if accelerator.is_last_process else 1.0, 1.0):
        before = plain.weight.item()
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        accelerator.unscale_gradients(optimizer)
        gradient = plain.weight.grad.item() if plain.weight.grad is not None else 0.0
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        told.append((skipped, plain.weight.item() == before, gradient))
    return told


def test_an_overflow_on_one_process_skips_the_step_on_all_and_says_so(two: Processes) -> None:
    for first, second in two.run(overflow_on_one):
        assert first[:2] == (True, True)
        assert second == (False, False, 1.0)


def who_writes(backend: str) -> tuple[bool, list[str]]:
    plugin = FullyShardedDataParallelPlugin(2) if backend == "fsdp2" else None
    accelerator = Accelerator(cpu=True, backend=backend, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Linear(2, 2))
    state = accelerator.get_state_dict(model)
    return accelerator.should_save_model, sorted(state)


def test_whoever_is_to_save_a_model_has_all_of_it(two: Processes) -> None:
    assert two.run(who_writes, "ddp") == [(True, ["bias", "weight"]), (False, ["bias", "weight"])]
    assert two.run(who_writes, "fsdp2") == [(True, ["bias", "weight"]), (False, [])]


def test_memory_is_given_back() -> None:
    import gc
    import weakref

    with fresh():
        accelerator = Accelerator(cpu=True)
        for free in (accelerator.free_memory, accelerator.clear):
            plain = nn.Linear(2, 2)
            watched = weakref.ref(plain)
            model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
            del plain
            model, optimizer = free(model, optimizer)
            gc.collect()
            assert (model, optimizer, watched()) == (None, None, None)
