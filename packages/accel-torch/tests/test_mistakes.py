"""Mistakes of newcomers: a script with one ends with a short message that says what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accel_testing.processes import run_command

pytestmark = pytest.mark.usefixtures("preloaded_python")
PRELOADED = ("accel_torch.accelerator", "torch.utils.data")

MOST_LINES = 23
"""Lines that a terminal of usual height shows, with the command and the next prompt."""

BEGIN = """
import torch
from accel_torch import *
from torch.utils.data import DataLoader, TensorDataset
"""
PREPARED = """
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
LOAD_INTO_ANOTHER = """
accelerator.save_state("saved")
accelerator.free_memory()
model = accelerator.prepare(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(200))))
accelerator.load_state("saved")
"""
LOAD_ANOTHER_OPTIMIZER = """
accelerator.save_state("saved")
accelerator.free_memory()
model = torch.nn.Linear(4, 1)
groups = [{"params": [model.weight]}, {"params": [model.bias]}]
model, optimizer = accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
accelerator.load_state("saved")
"""
MISTAKES = {
    "a dict of settings": ("Accelerator(cpu=True, fsdp_plugin={'fsdp_version': 2})", "Write fsdp_plugin=Fully"),
    "a word of settings": ("Accelerator(cpu=True, fsdp_plugin='FULL_SHARD')", "It is a str, and no settings object"),
    "settings without a list": (
        "Accelerator(cpu=True, kwargs_handlers=DistributedDataParallelKwargs())",
        "Write kwargs_handlers=[DistributedDataParallelKwargs(...)]",
    ),
    "a device as first argument": ("Accelerator('cuda')", "which each process chooses by itself"),
    "torch's name of a precision": ("Accelerator(cpu=True, mixed_precision='float16')", "is not one of no, fp16, bf16"),
    "a number in words": ("Accelerator(cpu=True, gradient_accumulation_steps='four')", "must be an int of at least 1"),
    "another model": (PREPARED + LOAD_INTO_ANOTHER, "Missing weights: 0.weight, 0.bias, 1.weight and 397 more"),
    "another optimizer": (PREPARED + LOAD_ANOTHER_OPTIMIZER, "the state of another optimizer"),
    "a loss as a number": (PREPARED + "accelerator.backward(0.5)", "Cannot compute the gradients of a float"),
    "all that a model returned": (
        PREPARED + "accelerator.backward({'loss': model.weight.sum()})",
        "gradients of a dict",
    ),
    "a loss for each sample": (PREPARED + "accelerator.backward(model(torch.ones(3, 4)))", "only for scalar outputs"),
    "a model to clip": (PREPARED + "accelerator.clip_grad_norm_(model, 1.0)", "Pass model.parameters()"),
    "weights for a model": (PREPARED + "accelerator.save_model(model.state_dict(), 'out')", "Pass the model;"),
    "a number to save": (PREPARED + "accelerator.register_for_checkpointing(3)", "Add these methods"),
    "no folder to save into": (PREPARED + "accelerator.save_state()", "Give a folder, or give ProjectConfiguration"),
    "no folder to load from": (PREPARED + "accelerator.load_state('nowhere')", "There is no such folder"),
    "less than no batches": (PREPARED + "accelerator.skip_first_batches(loader, -1)", "cannot be negative"),
    "another word for a mean": (
        PREPARED + "accelerator.reduce(torch.ones(2), reduction='average')",
        "Pass one of 'mean'",
    ),
    "a tracker misspelt": ("Accelerator(cpu=True, log_with='wandB')", "Did you mean 'wandb'?"),
    "a tracker without a folder": (
        "Accelerator(cpu=True, log_with='tensorboard').init_trackers('curves')",
        "Set project_dir=",
    ),
    "a function without a batch size": (
        "@find_executable_batch_size(starting_batch_size=8)\ndef train(model): ...\ntrain(None)",
        "Make the batch size its first parameter",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_few_lines(name: str, tmp_path: Path) -> None:
    text, answer = MISTAKES[name]
    script = tmp_path / "train.py"
    script.write_text(BEGIN + text, encoding="utf-8")
    done = run_command([sys.executable, str(script)], 120, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done
    assert answer in done.stderr
    assert len(done.stderr.rstrip().splitlines()) <= MOST_LINES, done.stderr
