"""Shards a model the way TRL and PEFT do, from the fields of the sharding settings."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from tiny_text import LENGTH, tell, tiny_model
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from trl.models.utils import prepare_fsdp

from accelerate import Accelerator, FullyShardedDataParallelPlugin


def model(adapters: bool) -> Any:
    base = tiny_model()
    if not adapters:
        return base
    config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(base, config)


def blocks(sharded: Any) -> list[str]:
    """Names of the parts that are sharded by themselves, as in the model."""
    parts = {name for name, part in sharded.named_modules() if isinstance(part, (FullyShardedDataParallel, FSDPModule))}
    return sorted(name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module") for name in parts)


def main(version: int, adapters: bool, prepared: bool, options: dict[str, Any], folder: str = "") -> None:
    own = {"use_orig_params": True, "sync_module_states": False} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **own, **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if not hasattr(accelerator.state, "fsdp_plugin"):
        # The original leaves it out on a CPU.
        accelerator.state.fsdp_plugin = plugin
    given = model(adapters)
    if adapters:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(given)
    if prepared:
        sharded = accelerator.prepare(given)
    else:
        # On a CPU the original names the device "cpu:0", which torch does not take for one of its own there.
        sharded = prepare_fsdp(given, SimpleNamespace(state=accelerator.state, device=torch.device("cpu")))
    words = (torch.arange(LENGTH) * 7 % 48).reshape(1, -1)
    with torch.no_grad():
        logits = sharded(input_ids=words).logits
    tell(logits=logits.flatten()[::17].tolist(), dtype=str(logits.dtype), blocks=blocks(sharded))
    accelerator.end_training()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
