"""Estimates the memory of training a small model of transformers by its config, and measures a real run of it.

python estimated_memory.py '{"kind": "bert"}'
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

import accel_check.started
from accel_check.train_model import training_case

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {**SIZES, "vocab_size": 500}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "vocab_size": 500}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 3, "num_heads": 4, "vocab_size": 500},
    ),
    "vit": ("ViTForImageClassification", {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 10}),
}
BATCH = ("--batch-size", "8", "--sequence-length", "32")


def written(kind: str, folder: str) -> None:
    """Write the config of a model, as a checkpoint has it."""
    architecture, sizes = CONFIGS[kind]
    config = getattr(transformers, architecture).config_class(**sizes, architectures=[architecture])
    config.save_pretrained(folder)


def estimated(folder: str, *options: str) -> dict[str, Any]:
    """The memory that the command says, by purpose."""
    words = [sys.executable, str(accel_check.started.__file__), "estimate-memory", folder, "--training", "--json"]
    done = subprocess.run([*words, *BATCH, *options], capture_output=True, text=True, check=True)
    memory: dict[str, Any] = json.loads(done.stdout)["memory"]
    return memory


def allocated(folder: str) -> int:
    """The most bytes that torch's allocator held in the second of two steps of a real run, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model, loss_function, batch = training_case(folder, {}, 8, 32)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            with record_function(f"step {step}"):
                loss_function(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    results: Any = recorded.profiler
    events = results.kineto_results.events()
    steps = next(event for event in events if event.name() == "step 1")
    now = peak = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        now += event.nbytes()
        if steps.start_ns() <= event.start_ns() <= steps.start_ns() + steps.duration_ns():
            peak = max(peak, now)
    return int(peak)


def main(kind: str) -> None:
    """Print estimates of one and of 64 processes, and what one process really held."""
    with tempfile.TemporaryDirectory() as folder:
        written(kind, folder)
        # The first run of a library loads what stays.
        allocated(folder)
        gc.collect()
        one, many = estimated(folder), estimated(folder, "--processes", "64", "--backend", "fsdp2")
        told = {"one": one, "many": many, "allocated": allocated(folder)}
    print("RESULT", json.dumps(told))


main(**json.loads(sys.argv[1]))
