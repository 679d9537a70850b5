"""Preparing, precision, unwrapping, and what a short training comes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def _network() -> Any:
    set_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _data() -> Any:
    inputs = torch.linspace(-1, 1, 48).reshape(-1, 3)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def _losses(**options: Any) -> Any:
    accelerator = Accelerator(cpu=True, **options)
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=2))
    seen = []
    for _ in range(3):
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    return seen


def in_full_precision() -> Any:
    return _losses()


def in_bfloat16() -> Any:
    return [round(loss, 2) for loss in _losses(mixed_precision="bf16")]


def dtypes_in_bfloat16() -> Any:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    outputs = model(torch.ones(1, 2))
    with accelerator.autocast():
        inside = torch.ones(2, 2) @ torch.ones(2, 2)
    weight = accelerator.unwrap_model(model).weight
    return [str(outputs.dtype), str(inside.dtype), str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype), str(weight.dtype)]


def autocast_switched_off() -> Any:
    from accelerate.utils import AutocastKwargs

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)


def kinds_after_preparing() -> Any:
    accelerator = Accelerator(cpu=True)
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = accelerator.prepare(DataLoader(_data(), batch_size=2), model, None, optimizer)
    return [type(item).__name__ for item in made]


def unwrapped() -> Any:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = _network()
    model = accelerator.prepare(plain)
    same = accelerator.unwrap_model(model) is plain
    outputs = accelerator.unwrap_model(model, keep_fp32_wrapper=False)(torch.ones(1, 3))
    return [same, str(outputs.dtype)]


def names_of_weights() -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_network())
    return [sorted(accelerator.get_state_dict(model)), sorted(accelerator.get_state_dict(model, unwrap=False))]


def only_for_evaluation() -> Any:
    accelerator = Accelerator(cpu=True)
    return type(accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)).__name__


def nothing_to_train() -> Any:
    accelerator = Accelerator(cpu=True)
    return type(accelerator.prepare(nn.Linear(1, 1).requires_grad_(False))).__name__


def what_cannot_be_prepared() -> Any:
    made = Accelerator(cpu=True).prepare("text", 3)
    return list(made)


def placement_of_the_wrong_length() -> Any:
    return Accelerator(cpu=True).prepare(nn.Linear(1, 1), device_placement=[True, False])


def memory_given_back() -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_network())
    before = len(accelerator._models)
    return [before, accelerator.free_memory(model), len(accelerator._models), accelerator.clear()]


def registry() -> Any:
    accelerator = Accelerator(cpu=True)
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(model, optimizer, scheduler, DataLoader(_data(), batch_size=2))
    kept = [accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders]
    return [len(items) for items in kept]


def prepared_twice() -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_network())
    again = accelerator.prepare(model)
    return [again is model, len(accelerator._models)]


def device_maps() -> Any:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    before = accelerator.verify_device_map(model)
    model.hf_device_map = {"a": "cpu", "b": "disk"}  # type: ignore[assignment]
    return [before, accelerator.verify_device_map(model)]


def step_with_a_closure() -> Any:
    accelerator = Accelerator(cpu=True)
    model = _network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)
    return accelerator.unwrap_model(model)[2].bias.tolist()


def fp16_on_a_cpu() -> Any:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    return [accelerator.mixed_precision, type(accelerator.scaler).__name__]
