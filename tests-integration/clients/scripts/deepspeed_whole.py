"""Builds models whole although they will be divided, and lets processes generate: python deepspeed_whole.py '{}'."""

from __future__ import annotations

import json
import sys

import torch
from tiny_text import WORDS, tell, tiny_model

from accelerate import Accelerator, DeepSpeedPlugin


def in_parts() -> bool:
    model = tiny_model()._from_config(tiny_model().config)
    return hasattr(next(model.parameters()), "ds_id")


def main(folder: str) -> None:
    zero = {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 0}
    table = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=table, zero3_init_flag=False)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    found = {"by the flag": in_parts()}
    with plugin.zero3_init_context_manager(enable=True):
        found["within the block"] = in_parts()
    found["after the block"] = in_parts()
    model = accelerator.prepare(tiny_model())
    model.eval()
    inner = accelerator.unwrap_model(model)
    length = 4 + 4 * accelerator.process_index
    made = inner.generate(torch.tensor([[1, 2, 3]]), max_length=length, do_sample=False, eos_token_id=WORDS)
    lengths = accelerator.gather(torch.tensor([made.shape[1]])).tolist()
    tell(**{"in parts": found, "divided": hasattr(next(inner.parameters()), "ds_id"), "lengths": lengths})
    accelerator.end_training()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
