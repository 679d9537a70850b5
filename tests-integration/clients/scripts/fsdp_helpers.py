"""Asks TRL, PEFT and transformers to shard a model by the plugin of the run: fsdp_helpers.py '{"version": 2}'."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from tiny_text import Texts, tell, tiny_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapped
from transformers.distributed.fsdp import get_fsdp_ckpt_kwargs, update_fsdp_plugin_peft
from trl.models.utils import prepare_fsdp

from accelerate import Accelerator, FullyShardedDataParallelPlugin


def adapted() -> Any:
    base = tiny_model()
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(base, config)


def chosen(model: Any, policy: Any) -> list[str]:
    """The modules that a policy of torch's wrapping takes for units of their own."""
    return [
        name for name, module in model.named_modules() if policy(module=module, recurse=False, nonwrapped_numel=10**9)
    ]


def units(model: Any) -> list[str]:
    found = [name for name, one in model.named_modules() if isinstance(one, (Wrapped, FSDPModule))]
    return [name.replace("_fsdp_wrapped_module.", "") for name in found]


def main(folder: str, version: int = 1, sharded: bool = True) -> None:
    model, words = adapted(), Texts(4).words
    told: dict[str, Any] = {"policy": chosen(model, fsdp_auto_wrap_policy(model)), "kept": get_fsdp_ckpt_kwargs()}
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "GPT2Attention,GPT2MLP"
    told["policy by variable"] = chosen(model, fsdp_auto_wrap_policy(model))
    del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "NoSuchLayer"
    try:
        fsdp_auto_wrap_policy(model)
    except Exception as error:
        told["unknown layer"] = type(error).__name__
    del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    if sharded:
        told |= prepared(model, words, version)
    tell(**told)


def prepared(model: Any, words: torch.Tensor, version: int) -> dict[str, Any]:
    """A model that trains by the changed plugin, and a reference that TRL shards beside it."""
    # torch sends no weights from the first process on a CPU when it is asked by FSDP version 1 itself, as TRL asks.
    options: dict[str, Any] = {"use_orig_params": True, "sync_module_states": False} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(version, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    reference = tiny_model().eval().requires_grad_(False)
    with torch.no_grad():
        wanted = reference(input_ids=words, labels=words).loss.item()
    update_fsdp_plugin_peft(model, accelerator)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(
        torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    )
    reference = prepare_fsdp(reference, accelerator)
    losses = []
    for _ in range(4):
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        found = reference(input_ids=words, labels=words).loss.item()
    return {
        "units": units(model),
        "reference units": units(reference),
        "reference": [found, wanted],
        "losses": losses,
        "training": reference.training,
    }


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
