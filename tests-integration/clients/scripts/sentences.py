"""Trains sentence vectors with sentence-transformers: python sentences.py '{"folder": ..., "arguments": {...}}'."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tiny_text import WORDS, Texts, tell
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed


def save_base(folder: Path) -> None:
    """Writes a small model; transformers lets only the first process write once they are connected."""
    torch.manual_seed(3)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=WORDS + 1, max_position_embeddings=16, **size, **dropout)).save_pretrained(folder)
    words = {f"w{number}": number for number in range(WORDS)} | {"[PAD]": WORDS}
    made = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", model_max_length=16).save_pretrained(folder)


def encoder(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32)], device="cpu")


def pairs(count: int) -> Dataset:
    """Halves of a text belong together."""
    rows = [[f"w{number}" for number in row.tolist()] for row in Texts(count).words]
    return Dataset.from_dict(
        {"anchor": [" ".join(row[:6]) for row in rows], "positive": [" ".join(row[6:]) for row in rows]}
    )


def similarity() -> EmbeddingSimilarityEvaluator:
    """Compares the halves of texts with numbers that stand for how alike they are."""
    rows = pairs(12)
    scores = [number / 12 for number in range(12)]
    return EmbeddingSimilarityEvaluator(rows["anchor"], rows["positive"], scores, show_progress_bar=False)


def main(folder: str, arguments: dict[str, Any], gathered: bool = False, evaluated: bool = False) -> None:
    base = Path(folder) / f"base-{os.environ.get('RANK', '0')}"
    save_base(base)
    common = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    size = {"max_steps": 5, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "seed": 5}
    training = SentenceTransformerTrainingArguments(output_dir=folder, **{**common, **size, **arguments})
    set_seed(5)
    model = encoder(base)
    trainer = SentenceTransformerTrainer(
        model,
        training,
        train_dataset=pairs(96),
        eval_dataset=pairs(22) if evaluated else None,
        evaluator=similarity() if evaluated else None,
        loss=MultipleNegativesRankingLoss(model, gather_across_devices=gathered),
    )
    trainer.train()
    vectors = trainer.model.encode(["w1 w2", "w3"], show_progress_bar=False)
    history = trainer.state.log_history
    tell(
        losses=[entry["loss"] for entry in history if "loss" in entry],
        norms=[entry["grad_norm"] for entry in history if "grad_norm" in entry],
        vectors=abs(vectors).sum().item(),
        metrics=trainer.evaluate() if evaluated else {},
        processes=trainer.accelerator.num_processes,
    )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
