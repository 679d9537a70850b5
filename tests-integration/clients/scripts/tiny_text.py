"""A tiny language model and texts of made-up words, for the scripts beside this one."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

WORDS = 48
LENGTH = 12


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """So many texts, in which each word tells the next but for a few."""

    def __init__(self, count: int, seed: int = 0) -> None:
        numbers = torch.Generator().manual_seed(seed)
        first = torch.randint(WORDS, (count, 1), generator=numbers)
        slips = torch.randint(3, (count, LENGTH), generator=numbers)
        self.words = (first + 5 * torch.arange(LENGTH) + slips) % WORDS

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def tiny_model(**changes: Any) -> GPT2LMHeadModel:
    """The same weights every time; without dropout, unless asked for."""
    torch.manual_seed(3)
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LENGTH, "vocab_size": WORDS}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**without, **size, **special, **changes}))


def tell(**what: Any) -> None:
    """Prints what the test reads, on the first process."""
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(what), flush=True)
