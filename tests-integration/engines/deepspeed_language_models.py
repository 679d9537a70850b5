"""Scenes of small language models of transformers with DeepSpeed, played on every process; prints what came of them."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accel_plugins.deepspeed.config import DeepSpeedPlugin
from accel_plugins.deepspeed.engine import gathered
from accel_state.errors import AccelError
from accel_state.mesh import DeepSpeedSequenceParallelConfig, ParallelismConfig
from accel_state.run_state import AcceleratorState
from accel_torch import Accelerator

TOKENS, WORDS = 8, 32
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=TOKENS,
    attn_implementation="sdpa",
)
ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def language_model(config: LlamaConfig = CONFIG) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def sentences(samples: int = 8, tokens: int = TOKENS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (samples, tokens), generator=generator)
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(tokens)} for row in words]
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def built_in_parts(folder: str) -> dict[str, Any]:
    """A model whose parameters are divided while transformers builds it, and while it reads it from a folder."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO))
    plugin = accelerator.deepspeed_plugin
    with plugin.zero3_init_context_manager(enable=False):
        whole = language_model()
    if accelerator.is_main_process:
        whole.save_pretrained(folder)
    accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(folder)
    sizes = [sum(parameter.numel() for parameter in whole.parameters())]
    sizes.append(sum(parameter.data.numel() for parameter in model.parameters()))
    with gathered(list(model.parameters())):
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        equal = all(torch.equal(one.data, other.data) for one, other in pairs)
    losses = _trained(accelerator, model)
    return {"sizes": sizes, "equal": equal, "losses": losses, "filled": plugin.get_value("zero_optimization")}


def plain(folder: str) -> list[float]:
    """The losses of the same model without DeepSpeed."""
    return _trained(Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(folder))


def _trained(accelerator: Accelerator, model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, sentences(16))
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def divided_sequences(stage: int = 1, size: int = 2, fixed: bool = False) -> dict[str, Any]:
    """The losses of a model whose sequences DeepSpeed divides among processes."""
    AcceleratorState._reset_state()
    length: dict[str, Any] = {"sp_seq_length": TOKENS, "sp_seq_length_is_variable": False} if fixed else {}
    world = int(os.environ["WORLD_SIZE"])
    parallelism_config = ParallelismConfig(
        sp_size=size, dp_shard_size=world // size, sp_handler=DeepSpeedSequenceParallelConfig(**length)
    )
    # Building it in parts draws other numbers.
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1e6, zero3_init_flag=False)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=parallelism_config)
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, sentences())
    losses, shapes = [], set()
    for _ in range(2):
        for batch in loader:
            shapes.add(tuple(batch["input_ids"].shape))
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            share, mean = _share_of_loss(logits, batch)
            # Stage 3 takes the mean of the gradients of the processes that share a sequence, the others the sum.
            accelerator.backward(share * size if stage == 3 else share)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean)
    accelerator.end_training()
    return {"losses": losses, "shapes": sorted(shapes), "batches": len(loader)}


def _share_of_loss(logits: Tensor, batch: Any) -> tuple[Tensor, float]:
    """This process's share of the mean over the tokens of the whole sequence, and that mean."""
    from deepspeed.utils import groups

    targets, group = batch["shift_labels"], groups._get_sequence_parallel_group()
    tokens = (targets != -100).sum()
    torch.distributed.all_reduce(tokens, group=group)
    share = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens
    mean = share.detach().clone()
    torch.distributed.all_reduce(mean, group=group)
    return share, mean.item()


def undivided_sequences() -> list[float]:
    """The losses of one process."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for batch in sentences():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def refused_sequences() -> list[str]:
    """What is said where sequences cannot be divided."""
    AcceleratorState._reset_state()
    parallelism_config = ParallelismConfig(sp_size=2)
    plugin = DeepSpeedPlugin(zero_stage=1, train_micro_batch_size_per_gpu=2)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=parallelism_config)

    def prepared(model: Any) -> Any:
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    eager = LlamaConfig(**{**CONFIG.to_dict(), "attn_implementation": "eager"})
    odd = LlamaConfig(**{**CONFIG.to_dict(), "num_attention_heads": 1, "num_key_value_heads": 1})
    said = [
        _refusal(lambda model=model: prepared(model))
        for model in (torch.nn.Linear(2, 2), language_model(eager), language_model(odd))
    ]
    loader = accelerator.prepare(sentences())
    said.append(_refusal(lambda: next(iter(loader))))
    prepared(language_model())
    said.append(_refusal(lambda: prepared(language_model())))
    said.append(_refusal(lambda: next(iter(accelerator.prepare(sentences(tokens=5))))))
    rows = [{"input_ids": torch.ones(4), "labels": torch.ones(4)}] * 8
    said.append(_refusal(lambda: next(iter(accelerator.prepare(DataLoader(rows, batch_size=2))))))  # type: ignore[arg-type]
    return said


def _refusal(call: Any) -> str:
    try:
        call()
    except AccelError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main() -> None:
    came = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    if not torch.distributed.is_initialized() or int(torch.distributed.get_rank()) == 0:
        print("RESULT " + json.dumps(came), flush=True)


if __name__ == "__main__":
    main()
