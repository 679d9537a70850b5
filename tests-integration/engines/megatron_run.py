"""A small training run under Megatron-LM, told what to do by a JSON text; prints its losses as one.

Megatron-LM's own code computes, on the processor in place of CUDA.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import torch
from simulated_cuda import simulate
from torch.utils.data import DataLoader, Dataset

from accel_megatron.config import MegatronLMPlugin
from accel_megatron.objects import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accel_state import PartialState
from accel_torch import Accelerator

WORDS, LENGTH, SAMPLES = 60, 16, 32
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 2,
        "n_embd": 32,
        "n_inner": 64,
        "n_head": 4,
        "n_positions": LENGTH,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    "llama": {
        **SIZES,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": LENGTH,
    },
    "megatron-bert": {
        **SIZES,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "num_labels": 2,
        "max_position_embeddings": LENGTH,
    },
    "t5": {
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_heads": 4,
        "layer_norm_epsilon": 1e-6,
        "dense_act_fn": "relu",
        "is_gated_act": False,
        "decoder_start_token_id": 0,
        "n_positions": LENGTH,
    },
}


class Model(torch.nn.Module):
    """Carries a configuration; Megatron-LM makes the layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=kind, vocab_size=WORDS, **CONFIGS[kind])
        self.weight = torch.nn.Parameter(torch.zeros(1))


class ModelForPreTraining(Model):
    """The same, by the name that models for pretraining have."""


class Words(Dataset[dict[str, torch.Tensor]]):
    """Counted words, so that there is something to learn, and what each kind of model wants beside them."""

    def __init__(self, kind: str, classify: bool) -> None:
        self._kind, self._classify = kind, classify

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) + 3 * index) % WORDS
        if self._kind == "t5":
            return {"input_ids": words, "labels": words.flip(0)}
        if self._kind == "megatron-bert":
            followed = torch.tensor(index % 2)
            if self._classify:
                return {"input_ids": words, "labels": followed}
            hidden = torch.where(torch.arange(LENGTH) % 4 == 0, words, -100)
            return {"input_ids": words, "labels": hidden, "next_sentence_label": followed}
        return {"input_ids": words}


def main(
    plugin: dict[str, Any] | None = None,
    kind: str = "gpt2",
    classify: bool = False,
    precision: str = "no",
    batch: int = 4,
    accumulation: int = 1,
    torch_schedule: bool = False,
    stretch: int = 1,
    save: str | None = None,
    load: str | None = None,
    corpus: str | None = None,
    epochs: int = 2,
) -> None:
    """Train for a few epochs; `save` writes a checkpoint after the first one, `load` begins after it.

    A schedule of torch moves once for each process that has other samples; `stretch` moves it as far with fewer.
    """
    PartialState(cpu=True)
    simulate()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        megatron_lm_plugin=MegatronLMPlugin(**(plugin or {})),
    )
    made: Any = ModelForPreTraining(kind) if kind == "megatron-bert" and not classify else Model(kind)
    optimizer: Any = torch.optim.AdamW(made.parameters(), lr=1e-2)
    schedule: Any = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97 ** (step * stretch))
        if torch_schedule
        else MegatronLMDummyScheduler(optimizer, total_num_steps=64, warmup_num_steps=4)
    )
    if corpus:
        _read_corpus(accelerator, made, optimizer, schedule, corpus, batch)
        return
    loader: Any = DataLoader(Words(kind, classify), batch_size=batch)
    model, optimizer, schedule, loader = accelerator.prepare(made, optimizer, schedule, loader)
    if load:
        accelerator.load_state(load, allow_missing=["random_states"])
    told = _trained(accelerator, model, optimizer, schedule, loader, range(1 if load else 0, epochs), save)
    if accelerator.is_main_process:
        print("RESULT " + json.dumps(told), flush=True)


class Tokens:
    """What Megatron's datasets ask of a tokenizer."""

    eod, pad, vocab_size = 0, 1, WORDS
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "Tokens"}


def _read_corpus(accelerator: Any, made: Any, optimizer: Any, schedule: Any, corpus: str, batch: int) -> None:
    """Write documents as Megatron-LM keeps them, and train on its own loaders of them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    if accelerator.is_main_process:
        builder = IndexedDatasetBuilder(f"{corpus}.bin", dtype=numpy.int32)
        for begin in range(64):
            builder.add_item((torch.arange(LENGTH + 5) + 3 * begin) % (WORDS - 2) + 2)
            builder.end_document()
        builder.finalize(f"{corpus}.idx")
    accelerator.wait_for_everyone()
    data = MegatronLMDummyDataLoader(
        data_path=[corpus],
        split="90,5,5",
        micro_batch_size=batch,
        tokenizer=Tokens(),
        data_cache_path=str(Path(corpus).parent / "cache"),
    )
    model, _, _, training, validation, _ = accelerator.prepare(made, optimizer, schedule, data, data, data)
    seen, losses = list[int](), list[float]()
    for batch_data, _ in zip(training, range(12), strict=False):
        seen += batch_data["tokens"][:, 0].tolist()
        losses.append(float(model(**batch_data).loss))
    model.eval()
    evaluated = float(model(**next(iter(validation))).loss)
    told = {
        "losses": losses,
        "seen": accelerator.gather(torch.tensor(seen)).tolist(),
        "evaluated": evaluated,
        "shape": list(batch_data["tokens"].shape),
        "consumed": accelerator.state.megatron_lm_plugin.consumed_samples,
    }
    if accelerator.is_main_process:
        print("RESULT " + json.dumps(told), flush=True)


def _trained(
    accelerator: Any, model: Any, optimizer: Any, schedule: Any, loader: Any, epochs: range, save: str | None
) -> dict[str, Any]:
    losses, rates, norms, shapes = list[float](), list[float](), list[float](), set[tuple[int, ...]]()
    skipped = 0
    for epoch in epochs:
        model.train()
        for batch in loader:
            shapes.add(tuple(batch["input_ids"].shape))
            output = model(**batch)
            accelerator.backward(output.loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(0.0 if norm is None else float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(output.loss))
            skipped += optimizer.step_was_skipped
            rates.append(float(schedule.get_last_lr()[0]))
        if save and epoch == 0:
            accelerator.save_state(save)
    model.eval()
    evaluated = model(**next(iter(loader)))
    logits = getattr(evaluated, "logits", None)
    plugin = accelerator.state.megatron_lm_plugin
    return {
        "losses": losses,
        "rates": rates,
        "norms": norms,
        "shapes": sorted(shapes),
        "steps": model.iteration,
        "skipped": skipped,
        "evaluated": float(evaluated.loss),
        "logits": None if logits is None else list(logits.shape),
        "model": type(model).__name__,
        "inner": type(accelerator.unwrap_model(model)).__name__,
        "type": str(accelerator.distributed_type.value),
        "global_batch_size": plugin.global_batch_size,
    }


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
