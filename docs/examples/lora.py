"""LoRA with peft: only the adapter trains, and only the adapter is saved.

pip install peft transformers
accel launch --cpu --num_processes 2 lora.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from accel_torch import Accelerator, set_seed


def main(steps=60):
    accelerator = Accelerator()
    set_seed(0)
    # Random weights keep the example offline; take `GPT2LMHeadModel.from_pretrained("gpt2")` in its place.
    base = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=32))
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn", "c_fc"], modules_to_save=["wte"]))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)

    # Sequences that count up, from any start.
    starts = torch.arange(256) % 32
    loader = DataLoader((starts[:, None] + torch.arange(16)) % 64, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, losses = 0, []
    while step < steps:
        for codes in loader:
            loss = model(input_ids=codes, labels=codes).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            step += 1
            if step == steps:
                break

    adapter = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        adapter.save_pretrained("runs/lora")
    accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    accelerator.print("learned:", losses[-1] < losses[0] / 2)
    accelerator.end_training()


if __name__ == "__main__":
    main()
