"""Trains adapters of PEFT in a loop of its own: python peft_lora.py '{"folder": ..., "accumulation": 1}'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_text import Texts, tell, tiny_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from accelerate import Accelerator


def trained(accelerator: Accelerator, epochs: int) -> tuple[Any, list[float]]:
    torch.manual_seed(1)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    loader = DataLoader(Texts(44), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return model, losses


def read_back(adapter: Path, folder: Path, device_map: dict[str, str] | None) -> Any:
    """The adapted model, perhaps in pieces on the CPU and on the disk."""
    base = folder / "base"
    tiny_model().save_pretrained(base, max_shard_size="10KB")
    offload = str(folder / "offload")
    model = AutoModelForCausalLM.from_pretrained(base, device_map=device_map, offload_folder=offload)
    if device_map is None:
        return PeftModel.from_pretrained(model, adapter)
    adapted = {f"base_model.model.{name}".rstrip("."): device for name, device in device_map.items()}
    return PeftModel.from_pretrained(model, adapter, device_map=adapted, offload_dir=offload)


def main(folder: str, accumulation: int = 1, precision: str = "no", epochs: int = 2) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision)
    model, losses = trained(accelerator, epochs)
    here, texts = Path(folder), Texts(4, seed=2).words
    adapter = here / "adapter"
    unwrapped = accelerator.unwrap_model(model).eval()
    accelerator.save_state(here / "state")
    logits = []
    if accelerator.is_main_process:
        unwrapped.save_pretrained(adapter)
        pieces = {"transformer.wte": "cpu", "lm_head": "cpu", "transformer.wpe": "cpu", "transformer.ln_f": "cpu"}
        maps = [None, {"": "cpu"}, {**pieces, "transformer.h.0": "disk", "transformer.h.1": "cpu"}]
        with torch.no_grad():
            # Precision belongs to the prepared model; what is read back computes in full.
            models = [unwrapped if precision == "no" else read_back(adapter, here, None)]
            models += [read_back(adapter, here, device_map).eval() for device_map in maps]
            logits = [one(input_ids=texts).logits.double().sum().item() for one in models]
    accelerator.wait_for_everyone()
    tell(losses=losses, logits=logits, files=sorted(path.name for path in (here / "state").iterdir() if path.is_file()))
    accelerator.end_training()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
