"""Trains a tiny language model with the Trainer of transformers: python trainer.py '{"arguments": {...}}'."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from tiny_text import LENGTH, Texts, tell, tiny_model
from transformers import Trainer, TrainingArguments, set_seed


def exact(model: torch.nn.Module, data: Texts) -> float:
    """The loss of all samples at once; the Trainer divides by the number of all words, the first included."""
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=data.words, labels=data.words).loss) * (LENGTH - 1) / LENGTH


def main(
    folder: str,
    arguments: dict[str, Any],
    resume: str | None = None,
    model: dict[str, Any] | None = None,
    whole: bool = False,
) -> None:
    common = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    size = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 5}
    training = TrainingArguments(output_dir=folder, **{**common, **size, **arguments})
    set_seed(5)
    trainer = Trainer(tiny_model(**(model or {})), training, train_dataset=Texts(96), eval_dataset=Texts(22, seed=1))
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    trainer.save_model(os.path.join(folder, "final"))
    trainer.accelerator.wait_for_everyone()
    history = trainer.state.log_history
    tell(
        losses=[entry["loss"] for entry in history if "loss" in entry],
        norms=[entry["grad_norm"] for entry in history if "grad_norm" in entry],
        rates=[entry["learning_rate"] for entry in history if "learning_rate" in entry],
        evaluated=evaluated["eval_loss"],
        exact=exact(trainer.model, Texts(22, seed=1)) if whole else None,
        steps=trainer.state.global_step,
        processes=trainer.accelerator.num_processes,
        kind=trainer.accelerator.distributed_type.value,
        files=sorted(
            os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names
        ),
    )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
