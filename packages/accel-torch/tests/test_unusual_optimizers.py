"""Optimizers that do not work like torch's own: schedule-free ones average weights, LOMO steps during backward.

The real libraries are used. That of LOMO needs transformers, so its tests run in `nox -s optimizers`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn

from accel_state.errors import NotOffered, SettingError
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin

KINDS = ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"]


def model_of() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def schedule_free(kind: str, parameters: Any) -> Any:
    return getattr(schedulefree, kind)(parameters, lr=0.05)


def listed(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in state.items()}


def plain_weights(kind: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights for training and for evaluation after some steps in plain torch."""
    model = model_of()
    optimizer = schedule_free(kind, model.parameters())
    optimizer.train()
    for step in range(steps):
        inputs, targets = batch_of(step)
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    training = listed(model.state_dict())
    optimizer.eval()
    return training, listed(model.state_dict())


def train(kind: str, backend: str, folder: str) -> dict[str, Any]:
    """Weights for training and evaluation after eight steps, and losses of two more, also after a resume."""
    plugin = FullyShardedDataParallelPlugin(2) if backend == "fsdp2" else None
    accelerator = Accelerator(cpu=True, backend=backend, fsdp_plugin=plugin)
    plain = model_of()
    model, optimizer = accelerator.prepare(plain, schedule_free(kind, plain.parameters()))

    def steps(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            inputs, targets = (
                half.chunk(accelerator.num_processes)[accelerator.process_index] for half in batch_of(step)
            )
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    optimizer.train()
    steps(0, 8)
    training = listed(accelerator.get_state_dict(model))
    optimizer.eval()
    evaluation = listed(accelerator.get_state_dict(model))
    accelerator.save_state(folder)
    optimizer.train()
    expected = steps(8, 10)
    accelerator.load_state(folder)
    optimizer.train()
    return {"training": training, "evaluation": evaluation, "expected": expected, "resumed": steps(8, 10)}


def near(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_free_optimizer_averages_weights_as_in_one_process(
    two: Processes, tmp_path: Path, kind: str, backend: str
) -> None:
    training, evaluation = plain_weights(kind, 8)
    assert training != evaluation
    for told in two.run(train, kind, backend, str(tmp_path / "state")):
        if told["training"]:
            near(told["training"], training)
            near(told["evaluation"], evaluation)
        assert told["resumed"] == told["expected"]


@pytest.mark.usefixtures("fresh_state")
def test_train_and_eval_change_nothing_of_an_optimizer_without_modes() -> None:
    accelerator = Accelerator(cpu=True)
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
    before = optimizer.state_dict()
    optimizer.eval()
    optimizer.train()
    assert optimizer.state_dict() == before
    accelerator.backward(weight.sum())
    optimizer.step()
    assert weight.item() == 0.5


@pytest.mark.usefixtures("fresh_state")
def test_stepping_in_evaluation_is_the_librarys_own_error() -> None:
    accelerator = Accelerator(cpu=True)
    model = model_of()
    model, optimizer = accelerator.prepare(model, schedule_free("AdamWScheduleFree", model.parameters()))
    optimizer.eval()
    accelerator.backward(model(batch_of(0)[0]).mean())
    with pytest.raises(Exception, match="train mode"):
        optimizer.step()


# -------------------------------------------------------------------------------------- LOMO


def lomo(kind: str, model: nn.Module) -> Any:
    """An optimizer of the library; AdaLomo puts its state on a GPU, and beside the model where there is none."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        library = pytest.importorskip("lomo_optim")
        if not torch.cuda.is_available():
            patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        return getattr(library, kind)(model, lr=0.1)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", ["Lomo", "AdaLomo"])
@pytest.mark.parametrize("by_name", [True, False])
def test_lomo_steps_in_backward_at_the_rate_that_is_given(kind: str, by_name: bool) -> None:
    accelerator = Accelerator(cpu=kind == "Lomo" or not torch.cuda.is_available())
    expected, model = model_of().to(accelerator.device), model_of().to(accelerator.device)
    alone = lomo(kind, expected)
    model, optimizer = accelerator.prepare(model, lomo(kind, model))
    assert accelerator.has_lomo_optimizer
    for step in range(4):
        inputs, targets = (half.to(accelerator.device) for half in batch_of(step))
        alone.fused_backward((expected(inputs) - targets).square().mean(), 0.02 * (step + 1))
        loss = (model(inputs) - targets).square().mean()
        if by_name:
            accelerator.lomo_backward(loss, 0.02 * (step + 1))
        else:
            accelerator.backward(loss, learning_rate=0.02 * (step + 1))
        optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.step_was_skipped
    assert listed(model.state_dict()) == listed(expected.state_dict())
    assert listed(model.state_dict()) != listed(model_of().state_dict())
    assert next(model.parameters()).device.type == accelerator.device.type


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", ["Lomo", "AdaLomo"])
def test_lomo_without_a_rate_is_refused(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = model_of()
    model, _ = accelerator.prepare(model, lomo(kind, model))
    with pytest.raises(SettingError, match="learning_rate="):
        accelerator.backward(model(batch_of(0)[0]).mean())


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", ["Lomo", "AdaLomo"])
def test_lomo_cannot_accumulate(kind: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model_of()
    model, _ = accelerator.prepare(model, lomo(kind, model))
    with pytest.raises(NotOffered, match="gradients cannot be accumulated"):
        accelerator.backward(model(batch_of(0)[0]).mean(), learning_rate=0.1)


@pytest.mark.usefixtures("fresh_state")
def test_a_rate_without_lomo_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = model_of()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not accelerator.has_lomo_optimizer
    with pytest.raises(SettingError, match="No prepared optimizer supports it"):
        accelerator.lomo_backward(model(batch_of(0)[0]).mean(), 0.1)
