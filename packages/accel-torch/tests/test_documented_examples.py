"""Every public method of the Accelerator has an example in its documentation, and every example runs."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, DataLoaderConfiguration, ProfileKwargs


def methods() -> dict[str, Callable[..., Any]]:
    """By name, the public methods of the Accelerator."""
    found = {}
    for name in dir(Accelerator):
        method = inspect.getattr_static(Accelerator, name)
        method = getattr(method, "__func__", method)
        if not name.startswith("_") and inspect.isfunction(method):
            found[name] = method
    return found


METHODS = methods()
NEEDS = {"lomo_backward": "lomo_optim"}
"""Packages that examples use, and that need not be installed."""


class Metric:
    """Takes what an example gives it."""

    def update(self, *values: object) -> None:
        """Take values."""


def network() -> nn.Module:
    return nn.Linear(3, 2)


def surroundings() -> dict[str, Any]:
    """What the examples name: objects of a script that prepared its model and reads a batch."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        log_with="jsonl",
        project_dir="project",
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data, batch_size=4)
    )
    accelerator.init_trackers("examples")
    inputs, targets = next(iter(loader))
    loss_function = nn.functional.cross_entropy
    accelerator.save_state("checkpoint")
    accelerator.save_model(model, "best")
    return {
        "DataLoader": DataLoader,
        "ProfileKwargs": ProfileKwargs,
        "Transformer": lambda config: network(),
        "accelerator": accelerator,
        "accuracy": 0.5,
        "another_batch": inputs,
        "answer": str.upper,
        "average_of_weights": network(),
        "batches_done": 1,
        "classes": ["cat", "dog"],
        "config": None,
        "cross_entropy": loss_function,
        "data": data,
        "epoch": 0,
        "evaluate": lambda model: 0.5,
        "inputs": inputs,
        "load_and_cache": lambda: data,
        "loader": loader,
        "loss": loss_function(model(inputs), targets),
        "loss_function": loss_function,
        "metric": Metric(),
        "model": model,
        "nn": nn,
        "one_batch": inputs,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 1,
        "targets": targets,
        "teacher": network(),
        "tokens": torch.ones(2, 5, dtype=torch.int64),
        "torch": torch,
        "train": lambda batch: None,
    }


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_a_method_runs(
    name: str, fresh_state: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(METHODS[name]) or "")
    assert examples, f"{name} has no example"
    assert any(name in example.source for example in examples), f"the example of {name} does not call it"
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    monkeypatch.chdir(tmp_path)
    names = surroundings()
    if name in NEEDS:
        names["Lomo"] = __import__(NEEDS[name]).Lomo
    if name == "prepare":
        names |= {"model": network(), "loader": DataLoader(names["data"])}
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 1)
    for example in examples:
        exec(compile(example.source, f"<example of {name}>", "exec"), names)
