"""Saves the adapter of a sharded PEFT model alone, and loads it into another model with other weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tiny_text import tell, tiny_model

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import load_fsdp_model, save_fsdp_model


def adapted(accelerator: Accelerator, seed: int) -> Any:
    base = tiny_model()
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
    return accelerator.prepare(get_peft_model(base, config))


def main(folder: str, kind: str, version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(version, state_dict_type=kind, use_orig_params=version == 1)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    plugin = accelerator.state.fsdp_plugin
    first, second = adapted(accelerator, 1), adapted(accelerator, 2)
    wanted, before = accelerator.get_state_dict(first), accelerator.get_state_dict(second)
    save_fsdp_model(plugin, accelerator, first, folder, adapter_only=True)
    accelerator.wait_for_everyone()
    load_fsdp_model(plugin, accelerator, second, folder, adapter_only=True)
    after = accelerator.get_state_dict(second)
    names = get_peft_model_state_dict(accelerator.unwrap_model(first), state_dict=wanted)
    file = Path(folder) / "pytorch_model_fsdp.bin"
    saved = torch.load(file, weights_only=True) if file.exists() else None
    tell(
        changed=sorted(name for name in after if not torch.equal(after[name], before[name])),
        as_wanted=all(torch.equal(after[name], wanted[name]) for name in after),
        adapters=sorted(name for name in wanted if "lora_" in name),
        saved=None if saved is None else sorted(saved),
        named_by_peft=sorted(names),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
