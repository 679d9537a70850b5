"""Fine-tunes on texts with the SFTTrainer of TRL: python trl_sft.py '{"folder": ..., "arguments": {...}}'."""

from __future__ import annotations

import json
import sys
from typing import Any

from datasets import Dataset
from tiny_text import WORDS, Texts, tell, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one number."""
    words = {f"w{number}": number for number in range(WORDS - 2)} | {"<eos>": WORDS - 2, "<pad>": WORDS - 1}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def texts(count: int, seed: int = 0) -> Dataset:
    """Texts of several lengths."""
    rows = [row[: 4 + index % 7].tolist() for index, row in enumerate(Texts(count, seed).words % (WORDS - 2))]
    return Dataset.from_dict({"text": [" ".join(f"w{number}" for number in row) for row in rows]})


def main(folder: str, arguments: dict[str, Any], lora: bool = False) -> None:
    common = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    size = {"max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 5, "max_length": 12}
    config = SFTConfig(output_dir=folder, **{**common, **size, **arguments})
    set_seed(5)
    peft_config = None
    if lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        tiny_model(), config, train_dataset=texts(64), eval_dataset=texts(10, 1), processing_class=tokenizer(),
        peft_config=peft_config,
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()
    history = trainer.state.log_history
    tell(
        losses=[entry["loss"] for entry in history if "loss" in entry],
        accuracy=[entry["mean_token_accuracy"] for entry in history if "mean_token_accuracy" in entry],
        tokens=[entry["num_tokens"] for entry in history if "num_tokens" in entry],
        evaluated=evaluated["eval_loss"],
        processes=trainer.accelerator.num_processes,
    )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
