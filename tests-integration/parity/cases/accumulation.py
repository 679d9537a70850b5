"""When gradients are synchronised, and what they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin


def _loader(samples: int = 14, batch_size: int = 1) -> Any:
    return DataLoader(TensorDataset(torch.arange(1.0, samples + 1).reshape(-1, 1)), batch_size=batch_size)


def _linear() -> Any:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    return model


def _trained(accelerator: Any, batches: Any, epochs: int = 1, rate: float = 0.001) -> dict[str, list[Any]]:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    synchronised, weights = [], []
    for _ in range(epochs):
        for (inputs,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            synchronised.append(accelerator.sync_gradients)
            weights.append(accelerator.unwrap_model(model).weight.item())
    return {"synchronised": synchronised, "weights": weights}


def every_third() -> Any:
    return _trained(Accelerator(cpu=True, gradient_accumulation_steps=3), _loader())


def two_epochs_that_end_inside_a_window() -> Any:
    return _trained(Accelerator(cpu=True, gradient_accumulation_steps=4), _loader(), epochs=2)


def without_the_end_of_the_loader() -> Any:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    return _trained(Accelerator(cpu=True, gradient_accumulation_plugin=plugin), _loader(), epochs=2)


def reduced_at_each_batch() -> Any:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    return _trained(Accelerator(cpu=True, gradient_accumulation_plugin=plugin), _loader())


def with_split_batches() -> Any:
    config = DataLoaderConfiguration(split_batches=True)
    return _trained(Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config), _loader(16, 4))


def number_changed_on_the_way() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first = _trained(accelerator, _loader(8))
    accelerator.gradient_accumulation_steps = 4
    return [first, accelerator.gradient_accumulation_steps, _trained(accelerator, _loader(16))]


def gradients_inside_of_a_window() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, batches = accelerator.prepare(_linear(), _loader(4))
    seen = []
    for (inputs,) in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            seen.append(accelerator.unwrap_model(model).weight.grad.item())
    return seen


def backward_alone_divides() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(_linear())
    accelerator.backward(model(torch.ones(1, 1)).sum())
    return accelerator.unwrap_model(model).weight.grad.item()


def no_sync_keeps_own_gradients() -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_linear())
    inputs = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        accelerator.backward(model(inputs).sum())
    own = accelerator.unwrap_model(model).weight.grad.item()
    accelerator.backward(model(inputs).sum())
    return [own, accelerator.unwrap_model(model).weight.grad.item()]


def synchronised_late() -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_linear())
    inputs = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        loss = model(inputs).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    return accelerator.unwrap_model(model).weight.grad.item()


def optimizer_waits_outside_of_a_synchronisation() -> Any:
    accelerator = Accelerator(cpu=True)
    model = _linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.gradient_state.sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight
    return [weight.item(), weight.grad.item(), accelerator.sync_gradients]


def two_models_at_once() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, other = _linear(), _linear()
    parameters = [*one.parameters(), *other.parameters()]
    one, other, optimizer, batches = accelerator.prepare(one, other, torch.optim.SGD(parameters, lr=0.01), _loader(8))
    weights = []
    for (inputs,) in batches:
        with accelerator.accumulate(one, other):
            accelerator.backward((one(inputs) * other(inputs)).sum())
            optimizer.step()
            optimizer.zero_grad()
        weights.append([accelerator.unwrap_model(model).weight.item() for model in (one, other)])
    return weights


def clipped() -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    weight = accelerator.unwrap_model(model).weight
    accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    after = weight.grad.flatten().tolist()
    accelerator.clip_grad_value_(model.parameters(), 0.7)
    return [float(norm), after, weight.grad.flatten().tolist()]


def infinity_norm() -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    return float(accelerator.clip_grad_norm_(model.parameters(), 2.0, norm_type=float("inf")))


def state_of_gradients() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    state = accelerator.gradient_state
    facts = [state.num_steps, state.adjust_scheduler, state.sync_with_dataloader, state.sync_gradients]
    return [*facts, state.end_of_dataloader, state.remainder, state.in_dataloader, state.active_dataloader]


def number_of_accumulation_as_variable() -> Any:
    import os

    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "5"
    return [
        Accelerator(cpu=True).gradient_accumulation_steps,
        Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps,
    ]
