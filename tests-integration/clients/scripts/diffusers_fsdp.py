"""Shards a model by the FSDP helpers of diffusers: python diffusers_fsdp.py '{"strategy": "SHARD_GRAD_OP"}'."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from diffusers.training_utils import get_fsdp_kwargs_from_accelerator, wrap_with_fsdp
from tiny_text import Texts, tell, tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapped
from torch.nn.parallel import DistributedDataParallel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from accelerate import Accelerator, FullyShardedDataParallelPlugin


def losses(model: Any, words: torch.Tensor, accelerator: Accelerator) -> list[float]:
    """What every process finds in its own texts, on the average."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(4):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.gather(loss.detach()[None]).mean().item())
    return found


def attempted(accelerator: Accelerator) -> dict[str, str]:
    """The arguments that diffusers takes from the run, or the name of the error that came."""
    try:
        return {name: str(value) for name, value in get_fsdp_kwargs_from_accelerator(accelerator).items()}
    except Exception as error:
        return {"error": type(error).__name__}


def main(folder: str, strategy: str | None = None, sharded: bool = True) -> None:
    plugin = FullyShardedDataParallelPlugin(1, sharding_strategy=strategy) if strategy else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    told: dict[str, Any] = {"arguments": attempted(accelerator)}
    if sharded:
        words = Texts(8).words[accelerator.process_index :: accelerator.num_processes]
        model = wrap_with_fsdp(
            tiny_model(),
            accelerator.device,
            offload=False,
            fsdp_kwargs=get_fsdp_kwargs_from_accelerator(accelerator),
            transformer_layer_cls=GPT2Block,
        )
        units = [(name, one) for name, one in model.named_modules() if isinstance(one, Wrapped)]
        told["units"] = [name.replace("_fsdp_wrapped_module.", "") for name, _ in units]
        told["strategies"] = sorted({str(one.sharding_strategy) for _, one in units})
        told["losses"] = losses(model, words, accelerator)
        told["plain"] = losses(DistributedDataParallel(tiny_model()), words, accelerator)
    tell(**told)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
