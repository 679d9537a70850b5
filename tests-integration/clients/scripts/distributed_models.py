"""Trains tiny random models that transformers distributes, and tells losses, norms and the weights at the end."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

STEPS, BATCH, LENGTH, TOKENS = 4, 4, 6, 32

SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
}


def write(kind: str, folder: str) -> None:
    """Write a model with random weights, equal in each run."""
    set_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def train(folder: str, sizes: dict[str, int], source: str = "", checkpoint: str = "") -> dict[str, Any]:
    """Train the model on the same batches of the whole run, whatever the layout is."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    distributed = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **distributed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(TOKENS, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if source:
        accelerator.load_state(source, allow_missing=("random_states",))
    losses, norms = [], []
    for (own,) in loader:
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if checkpoint:
        accelerator.save_state(checkpoint)
    weights = accelerator.get_state_dict(model)
    sums = {name: value.double().abs().sum().item() for name, value in weights.items()} if weights else {}
    return {"losses": losses, "norms": norms, "sums": sums, "samples": len(own), "main": accelerator.is_main_process}


def main(told: dict[str, Any]) -> None:
    """Write or train a model, as the test says."""
    if told["do"] == "write":
        write(told["kind"], told["folder"])
        result: dict[str, Any] = {"main": True}
    else:
        del told["do"]
        result = train(**told)
    if result.pop("main"):
        print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
