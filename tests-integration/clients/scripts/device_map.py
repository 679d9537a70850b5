"""Loads a language model in pieces with transformers: python device_map.py '{"folder": ...}'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_text import Texts, tell, tiny_model
from transformers import AutoModelForCausalLM

CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "by itself": {"device_map": "auto"},
    "with little memory": {"device_map": "auto", "max_memory": {"cpu": "80KB"}},
    "by hand": {
        "device_map": {
            "transformer.wte": "cpu",
            "transformer.wpe": "cpu",
            "transformer.h.0": "disk",
            "transformer.h.1": "cpu",
            "transformer.h.2": "disk",
            "transformer.h.3": "cpu",
            "transformer.ln_f": "disk",
            "lm_head": "cpu",
        }
    },
    "in bfloat16": {"device_map": {"transformer": "disk", "lm_head": "cpu"}, "dtype": torch.bfloat16},
}


def main(folder: str) -> None:
    base = Path(folder) / "base"
    tiny_model(n_layer=4, tie_word_embeddings=False).save_pretrained(base, max_shard_size="20KB")
    words, told = Texts(3, seed=2).words, {}
    for number, (name, arguments) in enumerate(CASES.items()):
        model = AutoModelForCausalLM.from_pretrained(
            base, offload_folder=f"{folder}/offload-{number}", **arguments
        ).eval()
        with torch.no_grad():
            logits = model(input_ids=words).logits.double().sum().item()
        made = model.generate(words[:, :4], max_new_tokens=4, do_sample=False).tolist()
        places = {part: str(device) for part, device in (getattr(model, "hf_device_map", None) or {}).items()}
        told[name] = {"logits": logits, "made": made, "places": places}
    tell(**told)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
