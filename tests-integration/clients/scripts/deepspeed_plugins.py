"""A student learns from a divided teacher, each with a DeepSpeed configuration: deepspeed_plugins.py '{}'."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tiny_text import WORDS, Texts, tell, tiny_model
from torch.utils.data import DataLoader
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import deepspeed_config

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import get_active_deepspeed_plugin

COMMON = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True}
FIXED = {"reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}


def seen(accelerator: Accelerator) -> dict[str, Any]:
    """What transformers sees of the configuration in use, and whether it builds a model in parts."""
    plugin = get_active_deepspeed_plugin(accelerator.state)
    return {
        "stage": plugin.zero_stage,
        "shown": deepspeed_config()["zero_optimization"]["stage"],
        "zero3": is_deepspeed_zero3_enabled(),
        "in parts": hasattr(next(built().parameters()), "ds_id"),
        "clipping": plugin.gradient_clipping,
        "selected": [one.selected for one in accelerator.state.deepspeed_plugins.values()],
    }


def built() -> Any:
    return tiny_model()._from_config(tiny_model().config)


def main(folder: str) -> None:
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config={**COMMON, "zero_optimization": {"stage": 2}}),
        "teacher": DeepSpeedPlugin(hf_ds_config={**COMMON, "zero_optimization": {"stage": 3, **FIXED}}),
        "whole": DeepSpeedPlugin(hf_ds_config={**COMMON, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}),
    }
    accelerator = Accelerator(deepspeed_plugin=plugins)
    looks = {"at first": seen(accelerator)}
    for name in ("teacher", "whole", "student"):
        accelerator.state.select_deepspeed_plugin(name)
        looks[name] = seen(accelerator)
    student = tiny_model()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    loader = DataLoader(Texts(32), batch_size=4)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(tiny_model(n_layer=1))
    teacher.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"]).logits.softmax(-1)
        loss = torch.nn.functional.cross_entropy(
            student(input_ids=batch["input_ids"]).logits.flatten(0, 1), wanted.flatten(0, 1)
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    # Processes that end after different numbers of words have to gather the teacher's weights together.
    start = torch.tensor([[1, 2, 3]])
    length = 4 + 4 * accelerator.process_index
    made = accelerator.unwrap_model(teacher).generate(start, max_length=length, do_sample=False, eos_token_id=WORDS)
    lengths = accelerator.gather(torch.tensor([made.shape[1]])).tolist()
    looks["at last"] = seen(accelerator)
    tell(looks=looks, losses=losses, lengths=lengths, kind=accelerator.distributed_type.value)
    accelerator.end_training()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
